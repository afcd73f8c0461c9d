"""The client half: NumPyClients for every algorithm, local solvers, and the bridge to Flower."""

from clients.algorithms import *  # noqa: F403
from clients.any_algorithm import CLIENTS, AnyAlgorithmClient, client_of
from clients.base import FederatedClient
from clients.learning.border import Border
from clients.learning.data import Batch, NoFixedSamples
from clients.learning.local_problem import Metrics
from clients.learning.loop import solve
from clients.learning.optimizers import SOLVERS, SPS, DeltaSGD
from clients.learning.oracle import ClientOracle
from clients.learning.own import OwnTraining
from clients.learning.problem import Problem
from clients.learning.sharing import all_but
from clients.node.attached import ClientApp, attach
from clients.node.bridge import client_app
from clients.node.host import Hosted
from clients.node.in_process import InProcessGrid
from clients.node.state import (
    ContextStore,
    DirectoryStore,
    Owner,
    StateError,
    Store,
    client_id,
    settle,
)
from clients.personalized import PersonalizedModel, personalized_model, personalized_models
from clients.request import Config, Received
from fl_strategies.core.oracle import Gradient, Oracle, Solved, Step
from fl_strategies.solvers.local import LocalTraining

__all__ = [
    "CLIENTS",
    "SOLVERS",
    "SPS",
    "AnyAlgorithmClient",
    "Batch",
    "Border",
    "ClientApp",
    "ClientOracle",
    "Config",
    "ContextStore",
    "DeltaSGD",
    "DirectoryStore",
    "FederatedClient",
    "Gradient",
    "Hosted",
    "InProcessGrid",
    "LocalTraining",
    "Metrics",
    "NoFixedSamples",
    "Oracle",
    "OwnTraining",
    "Owner",
    "PersonalizedModel",
    "Problem",
    "Received",
    "Solved",
    "StateError",
    "Step",
    "Store",
    "all_but",
    "attach",
    "client_app",
    "client_id",
    "client_of",
    "personalized_model",
    "personalized_models",
    "settle",
    "solve",
]
__all__ += dict.fromkeys(client.__name__ for client in CLIENTS.values())
