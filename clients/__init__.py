"""The client half: NumPyClients for every algorithm, local solvers, and the bridge to Flower."""

from clients.any_algorithm import CLIENTS, AnyAlgorithmClient
from clients.base import FederatedClient, Step
from clients.bridge import client_app, client_id
from clients.fedadmm import FedADMMClient
from clients.fedavg import FedAvgClient
from clients.fedbcd import FedBCDAsyncClient, FedBCDClient, FedBCDIClient
from clients.fedprox import FedProxClient
from clients.problem import FlatModel, Metrics, Problem
from clients.solvers import SOLVERS, LocalTraining, solve
from clients.state import ContextStore, DirectoryStore, Owner, StateError

__all__ = [
    "CLIENTS",
    "SOLVERS",
    "AnyAlgorithmClient",
    "ContextStore",
    "DirectoryStore",
    "FedADMMClient",
    "FedAvgClient",
    "FedBCDAsyncClient",
    "FedBCDClient",
    "FedBCDIClient",
    "FedProxClient",
    "FederatedClient",
    "FlatModel",
    "LocalTraining",
    "Metrics",
    "Owner",
    "Problem",
    "StateError",
    "Step",
    "client_app",
    "client_id",
    "solve",
]
