"""Clients trained as one stack are the clients trained one by one.

Tolerances are relative, in the 2-norm: 1e-12 in float64 on smooth problems, where each of some 20
steps adds a few rounding errors of 1e-16 and none is amplified more than about a hundredfold.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from cohorts import classified, clients_of, one_by_one, relative, smooth, stacked
from flwr.app import Array, ArrayRecord, Context, RecordDict
from flwr.serverapp.strategy import Result
from laws import TABLE, Row, local
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from clients import (
    AnyAlgorithmClient,
    ContextStore,
    FedAvgClient,
    FederatedClient,
    FlatModel,
    Problem,
    client_app,
    cohort,
)
from clients.cohort import fit_cohort
from clients.learning import choice
from clients.node.in_process import InProcessGrid

ROWS = {row.name: row for row in TABLE}
EXACT = 1e-12
PASSING = {"seconds", "bytes-down", "bytes-up", "bytes-saved"}
"""Metrics of a round that are not its clients'."""
SINGLE = 2e-5
"""In float32: 20 steps, each with roundings of 1.2e-7 over sums of up to 16 samples."""


@pytest.fixture(autouse=True)
def nothing_was_said() -> Iterator[None]:
    cohort.say_once.cache_clear()
    yield
    cohort.say_once.cache_clear()


def run(row: Row, federation: InProcessGrid, problems: Sequence[Problem], **options: Any) -> Result:
    """Return what three rounds come to."""
    model = problems[0].model
    pairs = zip(model.names, start(problems), strict=True)
    arrays = ArrayRecord({name: Array(array) for name, array in pairs})
    strategy = row.strategy(seed=3, **model.layout_options, **options)
    return strategy.start(federation, arrays, 3)


def start(problems: Sequence[Problem]) -> list[np.ndarray]:
    """Return the first arrays, the same whatever the model has been used for."""
    rng, layout = np.random.default_rng(1), problems[0].model.layout
    made = {
        name: np.asarray(rng.normal(0.0, 0.5, shape), layout.dtypes[name])
        for name, shape in layout.shapes.items()
    }
    made |= {copy: made[first] for copy, first in layout.copies.items()}
    return (
        [np.asarray(abs(array)) for array in made.values()] if layout.buffers else [*made.values()]
    )


def assert_alike(
    row: Row,
    problems: Sequence[Problem],
    *,
    within: float = EXACT,
    training: Mapping[str, Any] | None = None,
    cohort: int = 1000,
    **options: Any,
) -> None:
    """Models, metrics and states of both are the same, and no client was trained alone."""
    made = clients_of(problems, **(training or {}))
    alone = one_by_one(made, len(problems))
    at_once = stacked(made, len(problems), cohort)
    expected = run(row, alone, problems, **options)
    with mock.patch("clients.cohort._alone", side_effect=AssertionError("trained alone")):
        found = run(row, at_once, problems, **options)
    assert relative(*(r.arrays.to_numpy_ndarrays() for r in (found, expected))) < within
    for turn, metrics in expected.train_metrics_clientapp.items():
        mine = found.train_metrics_clientapp[turn]
        for name in metrics.keys() - PASSING:
            assert mine[name] == pytest.approx(metrics[name], rel=10 * within, nan_ok=True), name
    for number, context in enumerate(alone.contexts.values()):
        if number not in at_once.clients:  # it was never asked
            assert not context.state
            continue
        kept, records = at_once.clients[number].state.array_records, context.state.array_records
        assert kept.keys() == records.keys()
        for key, record in records.items():
            assert kept[key].keys() == record.keys()
            for name in record.keys() - {"nonce"}:
                mine, theirs = kept[key][name].numpy(), record[name].numpy()
                assert (mine.shape, mine.dtype) == (theirs.shape, theirs.dtype), name
                np.testing.assert_allclose(mine, theirs, rtol=1e3 * within, atol=10 * within)


# ---- every algorithm ----------------------------------------------------------------------------

stackable = pytest.mark.parametrize("row", [r for r in TABLE if r.name != "moon"], ids=str)


@stackable
@pytest.mark.parametrize("settings", [{}, {"solver": "sgd", "batch-size": 5, "epochs": 3}], ids=str)
def test_every_algorithm_on_a_stack_is_the_algorithm(row: Row, settings: dict[str, Any]) -> None:
    assert_alike(row, classified(smooth()), local=local(**settings))


@stackable
def test_every_algorithm_in_single_precision(row: Row) -> None:
    problems = classified(smooth(torch.float32))
    assert_alike(row, problems, within=SINGLE, local=local(solver="sgd", **{"batch-size": 5}))


VARIANTS: list[tuple[str, dict[str, Any]]] = [
    ("fedpd", {"oracle": "II", "inner_steps": 3, "inner_batch": 4, "full_every": 2}),
    ("fedpd", {"oracle": "II", "inner_steps": 2, "inner_batch": 0}),
    ("fedpd", {"p": 0.6, "x0_rule": "authors"}),
    ("scaffold", {"option": "I"}),
    ("per-fedavg", {"meta_gradient": "first-order"}),
    ("pfedme", {"local_start": "global"}),
    ("fedadmm", {"local_start": "global", "tracking": "global"}),
    ("fedbc", {"gamma": 5.0, "alpha_gamma": None}),
    ("fedbc", {"fraction_train": 0.6}),
    ("fedbcd", {"gamma": [0.1, 0.2, 0.3, 0.4, 0.5]}),
    ("fedbcd-i", {"fraction_train": 0.4, "box": 1.5}),
    ("fednova", {"mu": 0.5}),
]


@pytest.mark.parametrize(("name", "options"), VARIANTS, ids=str)
def test_variants_of_algorithms_on_a_stack(name: str, options: dict[str, Any]) -> None:
    assert_alike(
        ROWS[name], classified(smooth()), local=local(solver="sgd", **{"batch-size": 5}), **options
    )


# ---- solvers ------------------------------------------------------------------------------------

SETTINGS: list[dict[str, Any]] = [
    {"momentum": 0.9},
    {"momentum": 0.9, "nesterov": True, "weight-decay": 0.1},
    {"solver": "sgd", "solver-params": "dampening=0.5", "momentum": 0.5},
    {"solver": "gd", "momentum": 0.5, "residual": 0.0},
    {"solver": "adam", "lr": 0.01, "weight-decay": 0.1},
    {"solver": "adam", "lr": 0.01, "solver-params": "eps=0.01 amsgrad=True"},
    {"solver": "adagrad"},
    {"solver": "delta-sgd"},
    {"solver": "delta-sgd", "solver-params": "same_batch=False amplify_first=True epsilon=1e-8"},
    {"solver": "sps"},
    {"solver": "sps", "solver-params": "growth=0 max_step=0.3 f_star=0.1"},
    {"box": 0.4},
    {"extrapolation": 0.3, "box": 0.9},
    {"steps": 4},
    {"steps": 5, "random-steps": True},
    {"random-epochs": True, "epochs": 5},
    {"residual": 0.3, "epochs": 6, "weight-decay": 0.05},
    {"residual": 0.3, "steps": 7},
]


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
@pytest.mark.parametrize("name", ["fedadmm", "ditto"])
def test_every_solver_on_a_stack_is_the_solver(name: str, settings: dict[str, Any]) -> None:
    """FedADMM's subproblem has a slope and a pull; Ditto solves twice from one stream."""
    settings = {"solver": "sgd", "batch-size": 5, "epochs": 2} | settings
    assert_alike(ROWS[name], classified(smooth()), local=local(**settings))


def test_pfedme_measures_its_residual_on_a_stack() -> None:
    settings = local(solver="sgd", residual=0.2, **{"batch-size": 5})
    assert_alike(ROWS["pfedme"], classified(smooth()), local=settings)


def test_variants_of_pfedmes_inner_solver_take_a_mini_batch_for_all_there_is() -> None:
    """SPS lets a step size grow by the share of the samples that a mini-batch is: here all."""
    settings = local(solver="sps", lr=0.01, **{"batch-size": 5})
    assert_alike(ROWS["pfedme"], classified(smooth()), local=settings)


# ---- data and models ----------------------------------------------------------------------------


def test_clients_have_tensors_in_common_or_their_own() -> None:
    settings = local(solver="sgd", **{"batch-size": 5})
    assert_alike(ROWS["fedadmm"], classified(smooth(), shared=False), local=settings)


def test_samples_beyond_a_chunk_go_through_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("clients.learning.stack.CHUNK", 6)
    for row, others in (("scaffold", {"option": "I"}), ("q-fedavg", {})):
        settings = local(solver="sgd", residual=0.0, **{"batch-size": 4})
        assert_alike(ROWS[row], classified(smooth()), local=settings, **others)


class Regression(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Linear(4, 1)

    def forward(self, x: Tensor) -> Tensor:
        summed: Tensor = self.out(x)[:, 0]
        return summed


def rooted(outputs: Tensor, targets: Tensor) -> Tensor:
    return (1.0 + (outputs - targets) ** 2).sqrt().mean()


def test_targets_may_be_numbers_and_the_loss_ones_own() -> None:
    """Then there is no accuracy, and the loss of a sample is that of a batch of one."""
    model = FlatModel(Regression().double())
    rng = np.random.default_rng(2)
    problems = [
        Problem(model, rooted, *map(torch.from_numpy, pair))
        for pair in ((rng.normal(size=(n, 4)), rng.normal(size=n)) for n in (3, 8, 5))
    ]
    assert_alike(ROWS["fedavg"], problems, local=local(solver="sgd", **{"batch-size": 4}))


def penalty(w: Tensor) -> Tensor:
    return 0.05 * (w**2 / (1 + w**2)).sum()


@pytest.mark.parametrize("name", ["fedavg", "per-fedavg", "q-fedavg", "scaffold"])
def test_a_penalty_is_each_clients(name: str) -> None:
    problems = classified(smooth(), penalty=penalty)
    assert_alike(ROWS[name], problems, local=local(solver="sgd", **{"batch-size": 5}))


def tied() -> nn.Module:
    """Return a module of which two layers are one."""
    first, second = nn.Linear(4, 4), nn.Linear(4, 4)
    second.weight = first.weight
    return nn.Sequential(first, nn.Tanh(), second, nn.Linear(4, 3)).double()


def frozen() -> nn.Module:
    module = smooth()
    module[0].requires_grad_(False)
    return module


IMAGE, TEXT = (2, 6, 6), (7,)
MODELS: dict[str, tuple[Any, Sequence[int]]] = {
    "tied": (tied, (4,)),
    "frozen": (frozen, (4,)),
    "layer norm": (lambda: nn.Sequential(nn.Linear(4, 6), nn.LayerNorm(6), nn.Linear(6, 3)), (4,)),
    "convolutions": (
        lambda: nn.Sequential(
            nn.Conv2d(2, 4, 3), nn.GroupNorm(2, 4), nn.Tanh(), nn.AvgPool2d(2), nn.Flatten(),
            nn.Linear(16, 3),
        ),
        IMAGE,
    ),
    "embedding": (
        lambda: nn.Sequential(nn.Embedding(9, 3), nn.Flatten(), nn.Tanh(), nn.Linear(21, 3)), TEXT
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("algorithm", ["fedadmm", "scaffold"])
def test_models_that_vmap_takes_are_stacked(name: str, algorithm: str) -> None:
    build, shape = MODELS[name]
    torch.manual_seed(4)
    inputs = torch.randint(9, (99, 7), dtype=torch.uint8) if shape == TEXT else None
    problems = classified(build().double(), shape=shape, inputs=inputs)
    assert_alike(ROWS[algorithm], problems, local=local(solver="sgd", **{"batch-size": 5}))


# ---- what is trained one by one -----------------------------------------------------------------


def of_both(outputs: Tensor, targets: Tensor) -> Tensor:
    """A loss that is no mean over samples."""
    return cross_entropy(outputs, targets) + outputs.mean(0).square().sum()


class Last(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cells, self.out = nn.LSTM(1, 3, batch_first=True), nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        last: Tensor = self.out(self.cells(x[..., None])[0][:, -1])
        return last


class Noisy(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x + 0.1 * torch.randn_like(x))


def with_norm() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Linear(5, 3)).double()


ALONE: dict[str, tuple[Any, dict[str, Any], str]] = {
    "BatchNorm": (with_norm, {}, "BatchNorm1d looks at a whole mini-batch"),
    "a recurrent layer": (lambda: Last().double(), {}, "recurrent layers"),
    "dropout": (
        lambda: nn.Sequential(nn.Dropout(0.5), smooth()), {}, "Dropout draws random numbers"
    ),
    "random numbers": (lambda: Noisy(4, 3).double(), {}, "torch.vmap does not take it"),
    "a loss that is no mean": (smooth, {"loss": of_both}, "its loss is no mean over samples"),
    "class weights": (
        smooth,
        {"loss": nn.CrossEntropyLoss(torch.tensor([1.0, 2.0, 5.0], dtype=torch.float64))},
        "its loss is no mean over samples",
    ),
    "autocast": (smooth, {"autocast": torch.bfloat16}, "it runs in torch.bfloat16"),
}  # fmt: skip


@pytest.mark.parametrize("name", ALONE)
def test_what_cannot_be_stacked_is_trained_one_by_one_and_said_once(
    name: str, caplog: pytest.LogCaptureFixture
) -> None:
    build, options, reason = ALONE[name]
    torch.manual_seed(4)
    problems = classified(build(), **options)
    assert_the_same_bits(ROWS["fedavg"], problems, reason, caplog)


def test_algorithms_and_solvers_that_are_not_stacked_are_run_one_by_one(
    caplog: pytest.LogCaptureFixture,
) -> None:
    problems = classified(smooth())
    assert_the_same_bits(ROWS["moon"], problems, "moon's loss looks into the model", caplog)
    lbfgs = {"solver": "lbfgs", "epochs": 1}
    assert_the_same_bits(
        ROWS["fedavg"], problems, "'lbfgs' does not run on stacks", caplog, **lbfgs
    )


def assert_the_same_bits(
    row: Row,
    problems: Sequence[Problem],
    reason: str,
    caplog: pytest.LogCaptureFixture,
    **settings: Any,
) -> None:
    made, options = clients_of(problems), {"local": local(**settings)}
    with caplog.at_level(logging.INFO, "flwr"):
        caplog.clear()
        found = run(row, stacked(made, len(problems)), problems, **options)
        said = [r.getMessage() for r in caplog.records if "one by one" in r.getMessage()]
    expected = run(row, one_by_one(made, len(problems)), problems, **options)
    assert len(said) == 1
    assert reason in said[0]
    pairs = zip(*(r.arrays.to_numpy_ndarrays() for r in (found, expected)), strict=True)
    assert all(np.array_equal(*pair) for pair in pairs)


def test_arrays_of_each_clients_own_are_trained_one_by_one(
    caplog: pytest.LogCaptureFixture,
) -> None:
    module = smooth()
    model = FlatModel(module, share="!2")
    problems = [
        Problem(model, cross_entropy, p.inputs, p.targets, rows=p.rows)
        for p in classified(smooth())
    ]
    assert_the_same_bits(ROWS["fedavg"], problems, "arrays are each client's own", caplog)


def test_a_client_class_of_ones_own_is_asked_itself() -> None:
    class Mine(FedAvgClient):
        def fit(self, parameters: Any, config: Any) -> Any:
            return parameters, 7, {"mine": 1}

    problems = classified(smooth())
    clients = [Mine(p, client_id=i) for i, p in enumerate(problems)]
    outcomes = fit_cohort(clients, start(problems), [{}] * len(clients), cohort=9)
    assert all(samples == 7 for _, samples, _ in outcomes)  # type: ignore[misc]


def test_negative_targets_which_a_mean_leaves_out_are_not_stacked() -> None:
    problems = classified(smooth())
    problems[0].targets[0] = -100
    clients = [FedAvgClient(p, client_id=i) for i, p in enumerate(problems)]
    outcomes = fit_cohort(clients, start(problems), [{}] * len(clients), cohort=9)
    alone = [client.fit(start(problems), {}) for client in clients]
    for (mine, *_), (theirs, *_) in zip(outcomes, alone, strict=True):  # type: ignore[misc]
        assert all(map(np.array_equal, mine, theirs))


# ---- failures -----------------------------------------------------------------------------------

ASKED: dict[str, Any] = {
    "algorithm": "fedadmm", "rho": 0.5, "local-start": "client", "tracking": "client",
    "server-round": 1, "seed": 2, "acked-round": -1,
}  # fmt: skip


def test_a_client_that_fails_takes_no_other_with_it() -> None:
    problems = classified(smooth())
    contexts = [Context(1, i, {}, RecordDict(), {}) for i in range(len(problems))]

    def made(number: int, **others: Any) -> FederatedClient:
        keeps = {"store": ContextStore(contexts[number]), **others}
        return AnyAlgorithmClient(problems[number], client_id=number, **keeps)

    clients = [made(0), made(1, store=None), made(2), made(3, max_steps=1), made(4)]
    configs = [dict(ASKED) for _ in clients]
    configs[2]["rho"] = -1.0
    configs[3]["steps"] = 2
    clients.append(made(4))
    configs.append({**ASKED, "algorithm": "fedfoo"})
    outcomes = fit_cohort(clients, start(problems), configs, cohort=9)
    words = {
        1: "give them a store",
        2: "rho must be > 0",
        3: "takes at most 1",
        5: "unknown algorithm",
    }
    for number, word in words.items():
        assert isinstance(outcomes[number], ValueError)
        assert word in str(outcomes[number])
    for number in (0, 4):
        contexts[number].state.clear()
        arrays, samples, _ = made(number).fit(start(problems), configs[number])
        mine = outcomes[number]
        assert not isinstance(mine, Exception)
        assert relative(mine[0], arrays) < EXACT
        assert mine[1] == samples


def test_a_store_that_fails_in_the_end_fails_its_client_alone() -> None:
    problems = classified(smooth())
    contexts = [Context(1, i, {}, RecordDict(), {}) for i in range(len(problems))]
    clients = [
        AnyAlgorithmClient(p, client_id=i, store=ContextStore(contexts[i]))
        for i, p in enumerate(problems)
    ]
    save = ContextStore.save

    def full(self: ContextStore, *args: Any) -> None:
        if self.context is contexts[2]:
            raise OSError("no space left")
        save(self, *args)

    with mock.patch.object(ContextStore, "save", full):
        outcomes = fit_cohort(clients, start(problems), [ASKED] * len(clients), cohort=9)
    assert [isinstance(outcome, OSError) for outcome in outcomes] == [False, False, True] + 2 * [
        False
    ]


def test_what_fails_on_a_stack_is_trained_one_by_one(caplog: pytest.LogCaptureFixture) -> None:
    problems = classified(smooth())
    clients = [FedAvgClient(p, client_id=i) for i, p in enumerate(problems)]
    asked = {"server-round": 1, "seed": 2}
    broken = mock.patch("clients.learning.stacked.plan", side_effect=RuntimeError("no rule"))
    with broken, caplog.at_level(logging.INFO, "flwr"):
        outcomes = fit_cohort(clients, start(problems), [asked] * len(clients), cohort=9)
    assert "one by one: RuntimeError: no rule" in caplog.text
    for client, outcome in zip(clients, outcomes, strict=True):
        assert not isinstance(outcome, Exception)
        assert all(map(np.array_equal, outcome[0], client.fit(start(problems), asked)[0]))


# ---- how many at once ---------------------------------------------------------------------------


@pytest.mark.parametrize(("most", "memory"), [(2, 1 << 28), (1000, 11_000)])
def test_several_stacks_make_what_one_makes(most: int, memory: int) -> None:
    settings = local(solver="sgd", **{"batch-size": 5})
    problems = classified(smooth(), sizes=(7, 12, 3, 16))
    steps = mock.patch("clients.cohort._steps", wraps=cohort._steps)
    with mock.patch.object(cohort, "MEMORY", memory), steps as stacks:
        assert_alike(ROWS["fedadmm"], problems, local=settings, cohort=most)
    assert {len(call.args[0]) for call in stacks.call_args_list} == {2}


def test_the_memory_that_is_stated_bounds_the_vectors_of_a_stack() -> None:
    problems = classified(smooth(), sizes=(4,) * 40)
    vector = problems[0].model.vector
    each = sum(cohort.client_bytes(problems[0], 4))
    assert each >= 12 * vector.numel() * vector.element_size()
    seen: list[int] = []
    with mock.patch(
        "clients.cohort._stacked", lambda some, *_: seen.append(len(some)) or [0] * len(some)
    ):
        clients = [FedAvgClient(p, client_id=i) for i, p in enumerate(problems)]
        fit_cohort(clients, start(problems), [{}] * 40, cohort=1000, memory=13 * each)
    assert seen == [13, 13, 13, 1]


def rows(*gains: tuple[str, str, int, int, float]) -> list[dict[str, Any]]:
    names = ("device", "kind", "d", "clients", "gain")
    return [dict(zip(names, row, strict=True)) for row in gains]


def test_auto_stacks_where_the_table_has_a_gain_for_as_large_a_model_and_as_few_clients() -> None:
    table = rows(
        ("cpu", "dense", 100, 10, 4.0), ("cpu", "dense", 100, 50, 6.0),
        ("cpu", "dense", 900, 10, 0.9), ("cpu", "dense", 900, 50, 1.2),
        ("cpu", "conv", 900, 50, 9.0),
    )  # fmt: skip
    model = FlatModel(smooth())  # 43 parameters
    with mock.patch.object(choice, "table", return_value=table):
        assert choice.measured_gain("cpu", "dense", 43, 49) == 4.0
        assert choice.measured_gain("cpu", "dense", 101, 49) == 0.9
        assert choice.measured_gain("cpu", "dense", 101, 70) == 1.2
        for device, d, clients in (("cpu", 43, 9), ("cpu", 901, 99), ("cuda", 43, 99)):
            assert choice.measured_gain(device, "dense", d, clients) == 0.0
        assert choice.stacked_at("auto", model, [4] * 30) == (0, 30)
        assert choice.stacked_at("auto", model, [4] * 2) == (2, 2)
        assert choice.stacked_at(7, model, [4] * 9) == (0, 7)
        assert choice.stacked_at("off", model, [4] * 30) == (30, 1)
        choice._costs.cache_clear()


def test_auto_trains_those_one_by_one_that_work_much_longer_than_the_rest() -> None:
    """A step of ten or fewer takes 2.5 steps of one, one of fifty takes 8."""
    table = rows(("cpu", "dense", 100, 10, 4.0), ("cpu", "dense", 100, 50, 6.25))
    model = FlatModel(smooth())
    choice._costs.cache_clear()
    with mock.patch.object(choice, "table", return_value=table):
        for steps in ([4] * 60, [4] * 10, [1000, 900] + [4] * 50, [30, 20, 10, 5, 4, 3, 2, 1]):
            found, most = choice.stacked_at("auto", model, steps)
            totals = {alone: cost_of(steps, alone) for alone in range(len(steps) + 1)}
            assert most == len(steps)
            assert totals[found] <= 1.05 * min(totals.values())
        assert choice.stacked_at("auto", model, [1000, 900] + [4] * 50)[0] == 2
    choice._costs.cache_clear()


def test_who_works_much_longer_is_in_no_stack() -> None:
    problems = classified(smooth(), sizes=(640, *(5,) * 12))
    clients = [FedAvgClient(p, client_id=i) for i, p in enumerate(problems)]
    table = mock.patch.object(choice, "table", return_value=rows(("cpu", "dense", 100, 5, 4.0)))
    choice._costs.cache_clear()
    stacks = mock.patch("clients.cohort._stacked", side_effect=lambda some, *_: some)
    with table, stacks as stacked, mock.patch("clients.cohort._alone") as alone:
        fit_cohort(clients, start(problems), [{}] * 13, cohort="auto")
    choice._costs.cache_clear()
    assert [call.args[0].client_id for call in alone.call_args_list] == [0]
    assert [[c.client_id for c, _ in call.args[0]] for call in stacked.call_args_list] == [
        [*range(1, 13)]
    ]


def cost_of(steps: list[int], alone: int) -> float:
    """Return what the steps cost, the first clients one by one, step by step."""
    rest = steps[alone:]
    left = [sum(own > step for own in rest) for step in range(max(rest, default=0))]
    return sum(steps[:alone]) + sum(max(2.5, n / 4.0 if n < 50 else n / 6.25) for n in left)


def test_kinds_of_models() -> None:
    assert choice.kind_of(smooth()) == "dense"
    assert choice.kind_of(MODELS["convolutions"][0]()) == "conv"
    assert choice.kind_of(MODELS["layer norm"][0]()) == "other"


@pytest.mark.parametrize("setting", ["on", 1, 0, -3, 2.5, True, None])
def test_an_unknown_setting_is_refused(setting: Any) -> None:
    with pytest.raises(ValueError, match="cohort must be"):
        fit_cohort([], [], [], cohort=setting)
    with pytest.raises(ValueError, match="cohort must be"):
        client_app(clients_of([]), hosts=3, cohort=setting)


def test_the_committed_table_has_the_readme_settings() -> None:
    """Logistic regression pays from ten clients on; the papers' CNN never does on a CPU."""
    assert choice.measured_gain("cpu", "dense", 610, 100) > 2.0
    assert choice.measured_gain("cpu", "conv", 1_663_370, 100) < choice.GAIN
