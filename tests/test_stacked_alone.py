"""Clients that cannot be stacked are trained one by one, and one that fails fails alone."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from flwr.app import Context, RecordDict
from laws import Row, local
from stacked_runs import (
    EXACT,
    ROWS,
    assert_alike,
    classified,
    clients_of,
    one_by_one,
    relative,
    run,
    smooth,
    stacked,
    start,
)
from stacked_runs import nothing_was_said as nothing_was_said
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, mse_loss

from clients import (
    AnyAlgorithmClient,
    Border,
    ContextStore,
    FedAvgClient,
    FederatedClient,
    Problem,
)
from clients.stacking.fit import fit_all

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


class Centred(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x - x.mean(0))


def hooked() -> nn.Module:
    module = smooth()
    module[1].register_forward_hook(lambda layer, inputs, output: output - output.mean(0))
    return module


def masked() -> nn.Module:
    module = smooth()
    next(module.parameters()).register_hook(lambda gradient: gradient.clamp(min=0.0))
    return module


def clamped() -> nn.Module:
    module = smooth()
    module[1].register_full_backward_pre_hook(lambda layer, slopes: (slopes[0].clamp(min=0.0),))
    return module


def doubled() -> nn.Module:
    module = smooth()
    module[1].forward = lambda x: 2 * torch.tanh(x)
    return module


def with_norm() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Linear(5, 3)).double()


NO_MEAN = "its loss is not one of PyTorch's that are means over samples"
ALONE: dict[str, tuple[Any, dict[str, Any], str]] = {
    "BatchNorm": (with_norm, {}, "BatchNorm1d is not a layer that stacks take"),
    "a recurrent layer": (lambda: Last().double(), {}, "Last is not a layer that stacks take"),
    "dropout": (
        lambda: nn.Sequential(nn.Dropout(0.5), smooth()), {}, "Dropout is not a layer"
    ),
    "samples that are compared": (lambda: Centred(4, 3).double(), {}, "Centred is not a layer"),
    "softmax over samples": (lambda: nn.Sequential(smooth(), nn.Softmax(0)), {}, "Softmax is not"),
    "a hook": (hooked, {}, "Tanh has a hook"),
    "a parameter's hook": (masked, {}, "Linear has a hook"),
    "a backward hook": (clamped, {}, "Tanh has a hook"),
    "a forward that was set": (doubled, {}, "Tanh has a forward of its own"),
    "a loss that is no mean": (smooth, {"loss": of_both}, NO_MEAN),
    "class weights": (
        smooth,
        {"loss": nn.CrossEntropyLoss(torch.tensor([1.0, 2.0, 5.0], dtype=torch.float64))},
        NO_MEAN,
    ),
    "a class that is left out": (smooth, {"loss": nn.CrossEntropyLoss(ignore_index=1)}, NO_MEAN),
    "a sum": (smooth, {"loss": nn.CrossEntropyLoss(reduction="sum")}, NO_MEAN),
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


def test_a_problem_whose_gradient_was_replaced_is_trained_one_by_one(
    caplog: pytest.LogCaptureFixture,
) -> None:
    problems = classified(smooth())
    for problem in problems:
        problem.gradient = partial(halved, problem.gradient, problem.model)
    assert_the_same_bits(ROWS["fedavg"], problems, "its problem has a gradient of its own", caplog)


def halved(gradient: Callable[..., tuple[Tensor, Tensor]], model: Border, *batch: Any) -> Any:
    found = gradient(*batch)
    model.gradient /= 2
    return found


@pytest.mark.parametrize("loss", [nn.CrossEntropyLoss(label_smoothing=0.1), nn.CrossEntropyLoss()])
def test_a_loss_may_be_a_module(loss: Any) -> None:
    assert_alike(ROWS["fedavg"], classified(smooth(), loss=loss), local=local())


@pytest.mark.parametrize(
    ("name", "settings", "reason"),
    [
        ("moon", {}, "MOONClient does not say `stacks = True`"),
        ("fedavg", {"solver": "adam"}, "the solver 'adam' does not run on stacks"),
        ("fedavg", {"solver": "lbfgs", "epochs": 1}, "the solver 'lbfgs' does not run on stacks"),
        ("fedavg", {"solver": "sgd", "momentum": 0.5, "solver-params": "dampening=0.5"},
         "solver-params of sgd does not run on stacks"),
        ("fedavg", {"residual": 0.1}, "residual does not run on stacks"),
        ("fedavg", {"sam": 0.1}, "sam does not run on stacks"),
        ("fedavg", {"solver": "sgd", "variance-reduction": "svrg"},
         "variance-reduction does not run on stacks"),
    ],
)  # fmt: skip
def test_rules_and_solvers_that_stacks_do_not_take_are_run_one_by_one(
    name: str, settings: dict[str, Any], reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    assert_the_same_bits(ROWS[name], classified(smooth()), reason, caplog, **settings)


def assert_the_same_bits(
    row: Row,
    problems: Sequence[Problem],
    reason: str,
    caplog: pytest.LogCaptureFixture,
    **settings: Any,
) -> None:
    made, options = clients_of(problems), {"local": local(**{"epochs": 2, **settings})}
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
    model = Border(module, share="!2")
    problems = [
        Problem(model, cross_entropy, p.tensors.inputs, p.tensors.targets, rows=p.tensors.rows)
        for p in classified(smooth())
    ]
    assert_the_same_bits(ROWS["fedavg"], problems, "arrays are each client's own", caplog)


def test_a_client_class_of_ones_own_is_asked_itself() -> None:
    class Mine(FedAvgClient):
        def fit(self, parameters: Any, config: Any) -> Any:
            return parameters, 7, {"mine": 1}

    problems = classified(smooth())
    clients = [Mine(p, client_id=i) for i, p in enumerate(problems)]
    outcomes = fit_all(clients, start(problems), [{}] * len(clients), stack=9)
    assert all(samples == 7 for _, samples, _ in outcomes)  # type: ignore[misc]


def test_targets_that_the_loss_leaves_out_are_not_stacked() -> None:
    problems = classified(smooth())
    problems[0].tensors.targets[0] = -100
    assert_each_as_alone(problems, fail=())


@pytest.mark.filterwarnings("ignore:Using a target size")
@pytest.mark.filterwarnings("ignore:Using a target size")  # as in a plain loop
def test_outputs_that_a_loss_spreads_over_all_targets_are_not_stacked(
    caplog: pytest.LogCaptureFixture,
) -> None:
    model = Border(nn.Linear(4, 1).double())
    problems = [
        Problem(model, mse_loss, p.data.whole[0], p.data.whole[1].double())
        for p in classified(smooth())
    ]
    with caplog.at_level(logging.INFO, "flwr"):
        assert_each_as_alone(problems, fail=())
    assert "one by one" in caplog.text


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
    outcomes = fit_all(clients, start(problems), configs, stack=9)
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


def test_a_client_whose_samples_fail_takes_no_other_with_it() -> None:
    problems = classified(smooth())
    problems[3].tensors.targets[problems[3].tensors.rows] = 17
    assert_each_as_alone(problems, fail=(3,))


def assert_each_as_alone(problems: Sequence[Problem], fail: Sequence[int]) -> None:
    """Clients end as they do alone, to the bit."""
    clients = [FedAvgClient(p, client_id=i) for i, p in enumerate(problems)]
    outcomes = fit_all(clients, start(problems), [{"lr": 0.01}] * len(clients), stack=9)
    for number, (client, outcome) in enumerate(zip(clients, outcomes, strict=True)):
        if number in fail:
            with pytest.raises(type(outcome), match=re.escape(str(outcome))):
                client.fit(start(problems), {"lr": 0.01})
            continue
        assert not isinstance(outcome, Exception)
        assert all(map(np.array_equal, outcome[0], client.fit(start(problems), {"lr": 0.01})[0]))


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
        outcomes = fit_all(clients, start(problems), [ASKED] * len(clients), stack=9)
    assert [isinstance(outcome, OSError) for outcome in outcomes] == [False, False, True] + 2 * [
        False
    ]
