"""Strategies for the Flower federated-learning framework, for clients whose data differ."""

from fl_strategies.callbacks import BestModel, EarlyStop, History, RoundInfo
from fl_strategies.fedadmm import FedADMM
from fl_strategies.fedavg import FedAvg
from fl_strategies.fedbcd import FedBCD
from fl_strategies.fedbcd_async import FedBCDAsync
from fl_strategies.fedbcd_i import FedBCDI
from fl_strategies.fedpd import FedPD
from fl_strategies.fedprox import FedProx
from fl_strategies.schedules import step_decay
from fl_strategies.strategy import FederatedStrategy, Upload

STRATEGIES: dict[str, type[FederatedStrategy]] = {
    strategy.algorithm: strategy
    for strategy in (FedAvg, FedProx, FedADMM, FedPD, FedBCD, FedBCDI, FedBCDAsync)
}
"""Every strategy by the name of its algorithm."""

__all__ = [
    "STRATEGIES",
    "BestModel",
    "EarlyStop",
    "FedADMM",
    "FedAvg",
    "FedBCD",
    "FedBCDAsync",
    "FedBCDI",
    "FedPD",
    "FedProx",
    "FederatedStrategy",
    "History",
    "RoundInfo",
    "Upload",
    "step_decay",
]
