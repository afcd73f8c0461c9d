"""The guards: a mistake that would be silent or lose work is refused in one line that names it."""

from __future__ import annotations

import inspect
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord
from laws import START, local
from problems import Linear, grid, half_mean_square, make_client_app, quadratics, to_record

import fl_strategies
from clients import (
    AnyAlgorithmClient,
    Border,
    DirectoryStore,
    FedAvgClient,
    InProcessGrid,
    LocalTraining,
    OwnTraining,
    Problem,
    client_app,
    client_id,
)
from fl_strategies import (
    Checkpoints,
    EarlyStop,
    FedADMM,
    FedAvg,
    FederatedStrategy,
    NothingUsable,
    step_decay,
)

X, Y = torch.randn(6, 5, dtype=torch.float64), torch.randn(6, dtype=torch.float64)
QUIET: dict[str, Any] = {"fraction_evaluate": 0.0, "local": local()}


def problem(*changed: Any, **options: Any) -> Problem:
    given = (Border(Linear()), half_mean_square, X, Y)
    return Problem(*(b if a is None else a for a, b in zip(changed, given, strict=True)), **options)


def sampled(rows: Any) -> Problem:
    return problem(*[None] * 4, rows=rows)


def client(kind: Any = AnyAlgorithmClient, **changed: Any) -> Any:
    return kind(**{"problem": sampled(None), "client_id": 0} | changed)


def own_loop() -> OwnTraining:
    return OwnTraining(Border(Linear()), train=lambda *_: None, num_samples=6)


def start(**changed: Any) -> Any:
    given = {"grid": grid(quadratics(2)), "initial_arrays": to_record(START), "num_rounds": 1}
    return FedAvg(**QUIET).start(**given | changed)


def waiting_for(clients: int, **options: Any) -> Any:
    """Start where no other client can come."""
    app = client_app(lambda context: client(client_id=client_id(context)), **options)
    strategy = FedAvg(min_available_nodes=clients, **QUIET)
    return strategy.start(InProcessGrid(app, 2, hosts=options.get("hosts", 0)), to_record(START))


GUARDS: dict[str, list[tuple[Callable[[], object], str]]] = {
    "other rounds than meant would run, or none": [
        *[(lambda n=n: start(num_rounds=n), f"num_rounds must be an integer >= 1, got {n!r}")
          for n in (0, -3, 2.5, "3", True)],
        (lambda: EarlyStop(patience=2.5), "patience must be an integer >= 1, got 2.5"),  # type: ignore[arg-type]
        (lambda: EarlyStop(target=math.nan), "target must be a finite number, got nan"),
    ],
    "the run would wait for ever, or not at all": [
        (lambda: start(timeout=-1), "timeout must be >= 0, got -1"),
        (lambda: start(timeout=math.nan), "timeout must be a finite number >= 0, got nan"),
        (lambda: waiting_for(3), "3 clients are to be connected, the grid has 2"),
        (lambda: FedAvg(shared_population=2, **QUIET).start(grid(quadratics(2)), to_record(START)),
         "1 clients are to be connected, the grid has 0: shared_population=2 needs nodes with"
         " client_app(..., hosts=2)"),
        (lambda: waiting_for(1, hosts=2), "1 clients are to be connected, the grid has 0; 2 nodes"),
        (lambda: InProcessGrid(make_client_app(quadratics(1)), "4"),  # type: ignore[arg-type]
         "num_clients must be an integer >= 1, got '4'"),
    ],
    "rounds would be lost before the mistake shows": [
        (lambda: start(initial_arrays=Linear().state_dict()),
         "initial_arrays must be an ArrayRecord: ArrayRecord(module.state_dict()), got"),
        (lambda: start(evaluate_fn=lambda *_: (0.5, {})),
         "what evaluate_fn returns must be a MetricRecord, or None, got (0.5, {})"),
        *[(lambda name=name: start(**{name: 3}), f"{name} must be a ConfigRecord, or None, got 3")
          for name in ("train_config", "evaluate_config")],
        (lambda: InProcessGrid(client, 4),  # type: ignore[arg-type]
         "client_app must be a ClientApp: clients.client_app(client_fn) makes one, got"),
        (lambda: client_app(client()), "client_fn must be a function of the context, got"),
        (lambda: FedAvg(checkpoints="dir"), "checkpoints must be Checkpoints, got 'dir'"),
        (lambda: FedAvg(callbacks=print), "callbacks must be sequence of callables, got <built-in"),
        (lambda: FedAvg(callbacks=[3]), "callbacks must be sequence of callables, got [3]"),
        (lambda: FedAvg(train_metrics_aggr_fn=3), "train_metrics_aggr_fn must be callable, got 3"),
        (lambda: FedAvg(weighted_by_key=3), "weighted_by_key must be str, got 3"),
    ],
    "each letter of a text would be a name": [
        (lambda: FedAvg(buffers="abc"), "buffers must be iterable of str, got 'abc'"),
        (lambda: FedAvg(ties=["ab"]), "ties must be iterable of iterables of str, got ['ab']"),
    ],
    "every client would train by other settings than meant": [
        (lambda: FedAvg(local=5), "local must be mapping, got 5"),
        (lambda: FedAvg(local="lr=1"), "local must be mapping, got 'lr=1'"),
        (lambda: FedAvg(frozen=("a",)), "frozen must be mapping, got ('a',)"),
        (lambda: start(train_config=ConfigRecord({"momentum": -0.1})), "momentum must be >= 0"),
        (lambda: start(train_config=ConfigRecord({"batch_size": 2.5})), "batch_size must be an"),
        (lambda: step_decay(-1.0, rounds=5), "value must be >= 0, got -1.0"),
        (lambda: step_decay(1.0, rounds=2.5), "rounds must be an integer >= 1, got 2.5"),  # type: ignore[arg-type]
        (lambda: FedAvg(seed=2**63), "seed must be an integer >= 0 and <= 9.22337e+18, got"),
        (lambda: client(problem=own_loop(), training=LocalTraining()),
         "training says how a Problem is trained; a loop of one's own says it itself"),
    ],
    "another model than the clients' would be trained or tested": [
        (lambda: start(initial_arrays=ArrayRecord(
            {n: Array(a.numpy().astype("f4")) for n, a in to_record(START).items()})),
         "client 0 cannot train the initial model: its head is float64 (2, 2), that of the"),
        (lambda: start(initial_arrays=ArrayRecord({"head": Array(START[:2])})),
         "client 0 cannot train the initial model: the initial model lacks ['tail']"),
        (lambda: start(initial_arrays=to_record(START * np.nan)),
         "client 0 cannot train the initial model: array 'head' of the initial model is not"),
        (lambda: client(test=sampled(None)), "test must be of the problem's module, got 'another"),
    ],
    "samples would be left out, or paired with others' targets": [
        (lambda: problem(None, None, X[:2], None),
         "as many inputs as targets and at least one, got 2"),
        (lambda: sampled([]),
         "as many inputs as targets and at least one, got 6 and 6 with 0 rows"),
        (lambda: problem(*[None] * 4, micro_batch=-1),
         "micro_batch must be an integer >= 0, got -1"),
    ],
    "a client would have another's state and random numbers": [
        *[(lambda i=i, kind=kind: client(kind, client_id=i),
           f"client_id must be an integer >= 0, got {i!r}")
          for i in ("a", "3", 2.5, -1, True) for kind in (AnyAlgorithmClient, FedAvgClient)],
        (lambda: client(store=DirectoryStore("x", 3)), "store is of client 3, client_id is 0"),
    ],
    "nothing: Python's own error would name an attribute in place of the argument": [
        (lambda: start(grid=make_client_app(quadratics(1))),
         "grid must be a Grid, got a ClientApp"),
        (lambda: start(evaluate_fn=3), "evaluate_fn must be a function (round, arrays), got 3"),
        (lambda: problem(3, None, None, None), "module must be a torch.nn.Module, got 3"),
        (lambda: Border(Linear), "module must be a torch.nn.Module, got <class"),  # type: ignore[arg-type]
    ],
}  # fmt: skip
"""What each mistake would do in silence, or cost; the call that its guard refuses; the text.

Mistakes that Python, PyTorch or Flower tell by themselves, before work is lost, have no guard.
"""
ROWS = [(silent, *row) for silent, rows in GUARDS.items() for row in rows]


@pytest.mark.parametrize(
    ("silent", "call", "message"), ROWS, ids=[f"{row[0]}: {row[2]}" for row in ROWS]
)
def test_a_mistake_that_would_be_silent_or_lose_work_is_refused_at_once(
    silent: str, call: Callable[[], object], message: str
) -> None:
    with pytest.raises(ValueError, match=re.escape(message)) as error:
        call()
    assert "\n" not in str(error.value), silent


def test_numpys_numbers_are_numbers() -> None:
    strategy = FedADMM(
        seed=np.int64(3),
        fraction_train=np.float32(1.0),
        fraction_evaluate=np.float64(0.0),
        acknowledge=np.True_,
        rho={np.int64(1): np.float32(0.5)},
        local={"epochs": np.int64(2), "lr": {np.int64(1): np.float64(0.1)}},
    )
    same = FedADMM(seed=3, fraction_evaluate=0.0, rho=0.5, local={"epochs": 2, "lr": 0.1})
    models = [
        one.start(grid(quadratics(2)), to_record(START), np.int64(2)).arrays["head"].numpy()
        for one in (strategy, same)
    ]
    np.testing.assert_array_equal(*models)


def test_a_callback_stops_a_run_by_numpys_truth() -> None:
    strategy = FedAvg(callbacks=[lambda info: np.True_], **QUIET)
    strategy.start(grid(quadratics(2)), to_record(START), 3)
    assert strategy.result.train_metrics_clientapp.keys() == {1}


# ---- what only a run shows ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("client_fn", "reason"),
    [
        (
            lambda context: None,
            "client_fn's result must be a NumPyClient (without .to_client()), got None",
        ),
        (
            lambda context: client().to_client(),
            "must be a NumPyClient (without .to_client()), got NumPyClientWrapper(...)",
        ),
        (lambda context: client(client_id=7), "must be the node's partition-id, 0, got 7"),
    ],
)
def test_what_is_no_client_or_another_client_is_refused(client_fn: Any, reason: str) -> None:
    strategy = FedAvg(max_unusable_rounds=1, **QUIET)
    with pytest.raises(NothingUsable) as error:
        strategy.start(InProcessGrid(client_app(client_fn), 1), to_record(START), 2)
    assert reason in str(error.value)


def test_a_hosts_clients_have_whole_ids(caplog: pytest.LogCaptureFixture) -> None:
    app = client_app(lambda context: client(), hosts=[0, 1.5])  # type: ignore[list-item]
    with pytest.raises(NothingUsable):
        FedAvg(max_unusable_rounds=1, **QUIET).start(
            InProcessGrid(app, 2, hosts=1), to_record(START)
        )
    assert "ids of clients are integers, a host has [1.5]" in caplog.text


def test_hosted_clients_have_the_ids_by_which_they_are_asked() -> None:
    app = client_app(lambda context: client(client_id=1), hosts=[0, 1])
    strategy = FedAvg(**QUIET)
    strategy.start(InProcessGrid(app, 2, hosts=1), to_record(START), 1)
    assert strategy.result.train_metrics_clientapp[1]["clients-used"] == 1


def second_start(tmp_path: Path) -> FederatedStrategy:
    strategy = FedAvg(**QUIET)
    strategy.start(grid(quadratics(2)), to_record(START), 1)
    strategy.start(grid(quadratics(2)), to_record(START), 1)
    return strategy


def old_grid(tmp_path: Path) -> None:
    federation = grid(quadratics(2))
    for _ in range(2):
        FedADMM(**QUIET).start(federation, to_record(START), 1)


def unknown_best(tmp_path: Path) -> None:
    kept = Checkpoints(tmp_path / "run", best="train-los")
    FedAvg(checkpoints=kept, **QUIET).start(grid(quadratics(2)), to_record(START), 3)


def misspelt(tmp_path: Path) -> None:
    typos = ConfigRecord({"epoch": 3, "batch_size": 3, "hospital": 1, "lr": 0.1})
    strategy = FedAvg(fraction_evaluate=0.0)
    strategy.start(grid(quadratics(2)), to_record(START), 2, train_config=typos)


def without_test(tmp_path: Path) -> None:
    app = client_app(lambda context: client(client_id=client_id(context)))
    FedAvg(local=local()).start(InProcessGrid(app, 3), to_record(START), 1)


def void_rounds(tmp_path: Path) -> None:
    app = client_app(lambda context: 1 // 0)  # type: ignore[arg-type, return-value]
    FedAvg(**QUIET).start(InProcessGrid(app, 3), to_record(START), 2)


TOLD = {
    second_start: "continues the run of an earlier start; make a new strategy for a new run",
    old_grid: "a new strategy is a new run, and needs a new InProcessGrid or run of the app",
    unknown_best: "Checkpoints waits for 'train-los' (did you mean 'train-loss'?); there are",
    misspelt: "train_config has 'batch_size' (did you mean 'batch-size'?), 'epoch'"
    " (did you mean 'epochs'?)",
    without_test: "replies of 3 clients [0, 1, 2] left out: ValueError: the client has no"
    " test samples, and is left out of the mean: give it some by test=...",
    void_rounds: "every round was skipped (2): the model is as it was",
}


@pytest.mark.parametrize("mistake", TOLD)
def test_a_mistake_that_ends_no_run_is_told_once(
    mistake: Callable[[Path], object], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    mistake(tmp_path)
    assert sum(TOLD[mistake] in message for message in caplog.messages) == 1
    assert "hospital" not in caplog.text


@pytest.mark.parametrize("strategy", fl_strategies.STRATEGIES.values(), ids=lambda s: s.__name__)
def test_an_algorithms_own_hyperparameters_come_first_in_its_signature(strategy: Any) -> None:
    own = strategy.hyperparameters()
    assert {*[*inspect.signature(strategy).parameters][: len(own)]} == {*own}


def test_a_client_for_any_algorithm_shows_the_arguments_that_it_takes() -> None:
    shown = inspect.signature(AnyAlgorithmClient)
    assert shown == inspect.signature(FedAvgClient)
