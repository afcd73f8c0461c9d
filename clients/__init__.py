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
from clients.per_fedbc import PerFedBCClient
from clients.problem import FlatModel, Metrics, Problem
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
    "FederatedClient",
    "FlatModel",
    "LocalTraining",
    "Metrics",
    "Owner",
    "PerFedBCClient",
    "Problem",
    "StateError",
    "Step",
    "client_app",
    "client_id",
    "solve",
]
