"""The client half: NumPyClients for every algorithm, local solvers, and the bridge to Flower."""

from clients.any_algorithm import CLIENTS, AnyAlgorithmClient
from clients.base import FederatedClient, Step
from clients.bridge import client_app, client_id
from clients.delta_sgd import DeltaSGD
from clients.fedadmm import FedADMMClient
from clients.fedavg import FedAvgClient
from clients.fedbc import FedBCClient
from clients.fedbcd import FedBCDAsyncClient, FedBCDClient, FedBCDIClient
from clients.fedpd import FedPDClient
from clients.fedprox import FedProxClient
from clients.fedsgd import FedSGDClient
from clients.moon import MOONClient
from clients.per_fedavg import PerFedAvgClient
from clients.per_fedbc import PerFedBCClient
from clients.pfedme import PFedMeClient
from clients.problem import FlatModel, Metrics, Problem
from clients.q_fedavg import QFedAvgClient
from clients.scaffold import SCAFFOLDClient
from clients.solvers import SOLVERS, LocalTraining, solve
from clients.sps import SPS
from clients.state import ContextStore, DirectoryStore, Owner, StateError

__all__ = [
    "CLIENTS",
    "SOLVERS",
    "SPS",
    "AnyAlgorithmClient",
    "ContextStore",
    "DeltaSGD",
    "DirectoryStore",
    "FedADMMClient",
    "FedAvgClient",
    "FedBCClient",
    "FedBCDAsyncClient",
    "FedBCDClient",
    "FedBCDIClient",
    "FedPDClient",
    "FedProxClient",
    "FedSGDClient",
    "FederatedClient",
    "FlatModel",
    "LocalTraining",
    "MOONClient",
    "Metrics",
    "Owner",
    "PFedMeClient",
    "PerFedAvgClient",
    "PerFedBCClient",
    "Problem",
    "QFedAvgClient",
    "SCAFFOLDClient",
    "StateError",
    "Step",
    "client_app",
    "client_id",
    "solve",
]
