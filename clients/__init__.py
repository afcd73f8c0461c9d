"""The client half: NumPyClients for every algorithm, local solvers, and the bridge to Flower."""

from pathlib import Path
from typing import Any

from clients.any_algorithm import CLIENTS, AnyAlgorithmClient
from clients.base import FederatedClient
from clients.learning.drawn import NoFixedSamples
from clients.learning.model import FlatModel
from clients.learning.objective import Metrics, Objective
from clients.learning.optimizers import SPS, DeltaSGD
from clients.learning.oracle import ClientOracle
from clients.learning.problem import Problem
from clients.learning.sharing import all_but
from clients.learning.solvers import SOLVERS, solve
from clients.learning.streamed import StreamedProblem
from clients.node.bridge import client_app, client_id
from clients.node.host import Hosted
from clients.node.in_process import InProcessGrid
from clients.node.state import ContextStore, DirectoryStore, Owner, StateError, Store, settle
from clients.personalized import PersonalizedModel, personalized_model, personalized_models
from clients.request import Config, Received
from fl_strategies.core.hidden import check_hides_nothing
from fl_strategies.core.oracle import Gradient, Oracle, Solved, Step
from fl_strategies.solvers.local import LocalTraining

__all__ = [
    "CLIENTS",
    "SOLVERS",
    "SPS",
    "AnyAlgorithmClient",
    "ClientOracle",
    "Config",
    "ContextStore",
    "DeltaSGD",
    "DirectoryStore",
    "FederatedClient",
    "FlatModel",
    "Gradient",
    "Hosted",
    "InProcessGrid",
    "LocalTraining",
    "Metrics",
    "NoFixedSamples",
    "Objective",
    "Oracle",
    "Owner",
    "PersonalizedModel",
    "Problem",
    "Received",
    "Solved",
    "StateError",
    "Step",
    "Store",
    "StreamedProblem",
    "all_but",
    "client_app",
    "client_id",
    "personalized_model",
    "personalized_models",
    "settle",
    "solve",
]
for _client in CLIENTS.values():
    globals()[_client.__name__] = _client
    __all__ += [_client.__name__]


def __getattr__(name: str) -> Any:
    """Say what hides a package of the user's that may be meant.

    Type checkers learn that each algorithm's client is here: ``FedADMMClient`` and so on.
    """
    check_hides_nothing(Path(__file__).parent, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
