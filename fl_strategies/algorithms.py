"""Every algorithm, one line each: registries, tables and the laws in the tests derive from it."""

# isort: off
from fl_strategies.fedsgd import FedSGD as FedSGD
from fl_strategies.fedavg import FedAvg as FedAvg
from fl_strategies.fedprox import FedProx as FedProx
from fl_strategies.fednova import FedNova as FedNova
from fl_strategies.scaffold import SCAFFOLD as SCAFFOLD
from fl_strategies.proxskip import ProxSkip as ProxSkip
from fl_strategies.q_fedavg import QFedAvg as QFedAvg
from fl_strategies.fedadmm import FedADMM as FedADMM
from fl_strategies.fedadmm_insa import FedADMMInSa as FedADMMInSa
from fl_strategies.feddyn import FedDyn as FedDyn
from fl_strategies.a_fedpd import AFedPD as AFedPD
from fl_strategies.fedpd import FedPD as FedPD
from fl_strategies.fedpd_vr import FedPDVR as FedPDVR
from fl_strategies.fedbc import FedBC as FedBC
from fl_strategies.per_fedbc import PerFedBC as PerFedBC
from fl_strategies.bcd.fedbcd import FedBCD as FedBCD
from fl_strategies.bcd.fedbcd_i import FedBCDI as FedBCDI
from fl_strategies.bcd.fedbcd_async import FedBCDAsync as FedBCDAsync
from fl_strategies.bcd.fedbcd_i_async import FedBCDIAsync as FedBCDIAsync
from fl_strategies.ditto import Ditto as Ditto
from fl_strategies.fedrep import FedRep as FedRep
from fl_strategies.fedbabu import FedBABU as FedBABU
from fl_strategies.apfl import APFL as APFL
from fl_strategies.fedamp import FedAMP as FedAMP
from fl_strategies.moon import MOON as MOON
from fl_strategies.per_fedavg import PerFedAvg as PerFedAvg
from fl_strategies.pfedme import PFedMe as PFedMe
