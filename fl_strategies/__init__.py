"""Strategies for the Flower federated-learning framework, for clients whose data differ."""

from fl_strategies.callbacks import BestModel, ClientHistory, EarlyStop, History, RoundInfo
from fl_strategies.checkpoints import Checkpoints
from fl_strategies.fedadmm import FedADMM
from fl_strategies.fedavg import FedAvg
from fl_strategies.fedbc import FedBC
from fl_strategies.fedbcd import FedBCD
from fl_strategies.fedbcd_async import FedBCDAsync
from fl_strategies.fedbcd_i import FedBCDI
from fl_strategies.fedpd import FedPD
from fl_strategies.fedprox import FedProx
from fl_strategies.fedsgd import FedSGD
from fl_strategies.legacy import as_legacy
from fl_strategies.moon import MOON
from fl_strategies.per_fedavg import PerFedAvg
from fl_strategies.per_fedbc import PerFedBC
from fl_strategies.pfedme import PFedMe
from fl_strategies.q_fedavg import QFedAvg
from fl_strategies.scaffold import SCAFFOLD
from fl_strategies.schedules import step_decay
from fl_strategies.strategy import FederatedStrategy, Upload

STRATEGIES: dict[str, type[FederatedStrategy]] = {
    strategy.algorithm: strategy
    for strategy in (
        FedSGD,
        FedAvg,
        FedProx,
        SCAFFOLD,
        QFedAvg,
        FedADMM,
        FedPD,
        FedBC,
        PerFedBC,
        FedBCD,
        FedBCDI,
        FedBCDAsync,
        MOON,
        PerFedAvg,
        PFedMe,
    )
}
"""Every strategy by the name of its algorithm."""

__all__ = [
    "MOON",
    "SCAFFOLD",
    "STRATEGIES",
    "BestModel",
    "Checkpoints",
    "ClientHistory",
    "EarlyStop",
    "FedADMM",
    "FedAvg",
    "FedBC",
    "FedBCD",
    "FedBCDAsync",
    "FedBCDI",
    "FedPD",
    "FedProx",
    "FedSGD",
    "FederatedStrategy",
    "History",
    "PFedMe",
    "PerFedAvg",
    "PerFedBC",
    "QFedAvg",
    "RoundInfo",
    "Upload",
    "as_legacy",
    "step_decay",
]
