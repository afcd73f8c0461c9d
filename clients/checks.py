"""Mistakes in a client's class or arguments, or in what its rule returns, each told by its name."""

from __future__ import annotations

from clients.learning.objective import Objective
from fl_strategies.core.schedules import require
from fl_strategies.solvers.local import LocalTraining


def check_kinds(problem: object, test: object, store: object, training: object) -> None:
    """Raise ``ValueError`` for an argument of another kind."""
    wanted = "an Objective, such as Problem(FlatModel(module), loss, inputs, targets)"
    require(isinstance(problem, Objective), "problem", wanted, problem)
    require(test is None or isinstance(test, Objective), "test", wanted, test)
    keeps = not isinstance(store, type) and hasattr(store, "rounds")
    wanted = "a Store, such as ContextStore(context) or DirectoryStore(path, client_id)"
    require(store is None or keeps, "store", wanted, store)
    trains = training is None or isinstance(training, LocalTraining)
    require(trains, "training", "LocalTraining(...)", training)
