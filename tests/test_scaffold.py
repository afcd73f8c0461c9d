"""SCAFFOLD: the matrix recursion, and c as the mean of the clients' c."""

from __future__ import annotations

from functools import cache, partial
from typing import Any

import numpy as np
import pytest
import torch
from federations import drop, lose
from flwr.app import Array, ArrayRecord, Message, RecordDict
from laws import RATE, START, STEPS, local, quiet, train
from problems import (
    DIM,
    NODES,
    Quadratic,
    forget,
    grid,
    kept,
    make_client_app,
    optimum,
    quadratics,
    to_record,
    to_vector,
)

from clients.node.in_process import InProcessGrid
from fl_strategies import SCAFFOLD, FedAvg
from fl_strategies.core.schedules import at

one = partial(quiet, SCAFFOLD)


def control(strategy: SCAFFOLD) -> np.ndarray:
    """Return c [5]."""
    return np.asarray(strategy.vectors(strategy.state, strategy.make_round(1))["control"])


def gap(strategy: SCAFFOLD, federation: InProcessGrid) -> float:
    """Return max |c - mean_i c_i|."""
    each = [fields["c"] for fields in kept(federation, strategy.ledger.acked)]
    return float(np.abs(control(strategy) - np.mean(each, axis=0)).max())


def recursion(
    problems: list[Quadratic],
    who: list[list[int]],
    *,
    lr: Any = RATE,
    eta_g: Any = 1.0,
    option: str = "II",
    decay: float = 0.0,
) -> np.ndarray:
    """Return the model after the rounds ``who``, by matrices: c_i+ is the mean of the gradients."""
    theta, c, own = START, np.zeros(DIM), np.zeros((len(problems), DIM))
    for number, chosen in enumerate(who, start=1):
        ends, before = [], own.copy()
        for i in chosen:
            w, seen, rate = theta, [], at(lr, number)
            for _ in range(STEPS):
                seen.append(problems[i].A @ (w - problems[i].b) + decay * w)
                w = w - rate * (seen[-1] - before[i] + c)
            own[i] = np.mean(seen, axis=0) if option == "II" else problems[i].gradient(theta)
            ends.append(w)
        theta = theta + at(eta_g, number) * (np.mean(ends, axis=0) - theta)
        c = c + (own - before).sum(axis=0) / len(problems)
    return theta


@pytest.mark.parametrize(
    "hyperparameters",
    [
        {},
        {"eta_g": 1.4},
        {"eta_g": {1: 1.2, 3: 0.5}},
        {"option": "I"},
        {"lr": {1: 0.15, 3: 0.05}},
        {"decay": 0.2},
    ],
    ids=str,
)
@pytest.mark.parametrize("share", [1.0, 0.5])
def test_rounds_are_the_matrix_recursion(hyperparameters: dict[str, Any], share: float) -> None:
    problems, who = quadratics(4), []
    mine = {name: value for name, value in hyperparameters.items() if name in ("eta_g", "option")}
    settings = local(
        lr=hyperparameters.get("lr", RATE), **{"weight-decay": hyperparameters.get("decay", 0.0)}
    )
    strategy = one(
        **mine,
        local=settings,
        fraction_train=share,
        callbacks=[lambda info: who.append(sorted(info.clients))],
    )
    found = train(strategy, grid(problems), 5)
    assert [len(chosen) for chosen in who] == [int(4 * share)] * 5
    np.testing.assert_allclose(found, recursion(problems, who, **hyperparameters), rtol=1e-12)


@pytest.mark.slow
def test_with_lost_replies_it_still_converges_to_the_optimum_and_fedavg_does_not() -> None:
    problems = quadratics(4)
    found = train(one(fraction_train=0.5), grid(problems, fault=drop(0.3, after=1)), 100)
    np.testing.assert_allclose(found, optimum(problems), atol=1e-6)
    uniform = FedAvg(weights="uniform", fraction_evaluate=0.0, local=local())
    assert np.abs(train(uniform, grid(problems), 60) - optimum(problems)).max() > 1e-2


@pytest.mark.slow
def test_option_one_goes_with_momentum_and_converges_to_the_optimum() -> None:
    problems = quadratics(4)
    strategy = one(option="I", local=local(lr=0.05, momentum=0.5))
    np.testing.assert_allclose(train(strategy, grid(problems), 90), optimum(problems), atol=1e-7)


def test_a_first_round_is_fedavgs_with_uniform_weights() -> None:
    uniform = FedAvg(weights="uniform", fraction_evaluate=0.0, local=local())
    expected = train(uniform, grid(quadratics(4)), 1)
    np.testing.assert_allclose(train(one(), grid(quadratics(4)), 1), expected, rtol=1e-13)


def test_one_full_step_of_all_clients_is_gradient_descent() -> None:
    problems, theta = quadratics(4), START
    for _ in range(6):
        theta = theta - RATE * np.mean([q.gradient(theta) for q in problems], axis=0)
    np.testing.assert_allclose(
        train(one(local=local(epochs=1)), grid(problems), 6), theta, rtol=1e-12
    )


# ---- c is the mean of the c_i -------------------------------------------------------------------


@pytest.mark.parametrize("option", ["I", "II"])
def test_c_is_the_mean_of_the_clients_c_also_when_replies_are_lost(option: str) -> None:
    federation = grid(quadratics(6), fault=drop(0.3, after=1))
    strategy = one(option=option, min_train_nodes=6)
    theta = train(strategy, federation, 1)
    strategy.fraction_train, strategy.min_train_nodes = 0.5, 1
    strategy.start(federation, to_record(theta), 25)
    assert gap(strategy, federation) < 1e-12
    assert np.abs(control(strategy)).max() > 1e-3


@pytest.mark.slow
def test_without_acknowledgement_lost_replies_make_c_another_than_the_mean() -> None:
    federation = grid(quadratics(6), fault=drop(0.3, after=1))
    strategy = one(acknowledge=False)
    train(strategy, federation, 25)
    rounds = [
        [int(key.rsplit("-", 1)[1]) for key in context.state.array_records]
        for context in federation.contexts.values()
    ]
    newest = [fields["c"] for fields in kept(federation, dict(enumerate(map(max, rounds))))]
    assert np.abs(control(strategy) - np.mean(newest, axis=0)).max() > 1e-2


@pytest.mark.slow
def test_the_invariant_holds_in_float32_with_mini_batches_and_lost_replies() -> None:
    """Rounding: each change used has entries below 200 and is rounded once, by 2^-24 of itself."""
    app = make_client_app(quadratics(6), dtype=torch.float32)
    federation = InProcessGrid(app, 6, fault=drop(0.3, after=1))
    settings = local(solver="sgd", **{"batch-size": 3, "random-epochs": True})
    start = {name: Array(a.numpy().astype(np.float32)) for name, a in to_record(START).items()}
    strategy = one(local=settings)
    result = strategy.start(federation, ArrayRecord(start), 25)
    used = sum(int(m["clients-used"]) for m in result.train_metrics_clientapp.values())
    assert gap(strategy, federation) < used * 200 * 2**-24 / 6


def test_a_client_that_joins_later_has_c_zero_and_counts_in_the_mean() -> None:
    federation = grid(quadratics(4))
    absent = federation.contexts.pop(NODES[3])
    strategy = one(node_wait=0.1)
    theta = train(strategy, federation, 3)
    three = control(strategy)
    assert gap(strategy, federation) < 1e-12
    federation.contexts[NODES[3]] = absent
    seen: list[np.ndarray] = []

    def listen(request: Message, reply: Message) -> Message:
        if request.metadata.message_type == "train":
            sent = request.content["arrays"]
            seen.append(to_vector([sent["control/head"].numpy(), sent["control/tail"].numpy()]))
        return reply

    federation.fault = listen
    strategy.start(federation, to_record(theta), 1)
    np.testing.assert_allclose(seen, [three * 3 / 4] * 4, rtol=1e-12)
    assert gap(strategy, federation) < 1e-12


@pytest.mark.parametrize("policy", ["reset", "refuse"])
def test_what_a_lost_state_had_put_into_c_stays_there(policy: str) -> None:
    """A reset client begins anew beside it; a refused one is left out, and its c_i stands."""
    federation = grid(quadratics(4))
    strategy = one(lost_state=policy)
    theta = train(strategy, federation, 3)
    before = [fields["c"] for fields in kept(federation, strategy.ledger.acked)]
    forget(federation, 2)
    result = strategy.start(federation, to_record(theta), 2)
    rejected = result.train_metrics_clientapp[5]["clients-rejected"]
    assert rejected == (1 if policy == "refuse" else 0)
    rest = [i for i in range(4) if i != 2]
    after = [fields["c"] for fields in kept(federation, strategy.ledger.acked | {2: 5})]
    total = sum(after[i] for i in rest) + before[2] + (after[2] if policy == "reset" else 0.0)
    np.testing.assert_allclose(4 * control(strategy), total, rtol=1e-11)


def test_a_second_start_goes_on_where_the_first_ended() -> None:
    at_once, in_two = (grid(quadratics(5), fault=drop(0.3, after=1)) for _ in range(2))
    whole, strategy = one(fraction_train=0.6), one(fraction_train=0.6)
    expected = train(whole, at_once, 6)
    first = train(strategy, in_two, 2)
    found = to_vector(strategy.start(in_two, to_record(first), 4).arrays)
    np.testing.assert_array_equal(found, expected)
    np.testing.assert_array_equal(control(strategy), control(whole))


# ---- what a reply that is not used must not do --------------------------------------------------

BAD = {
    "nan": (np.array([np.nan]), "array 'control/tail' is not finite"),
    "shape": (np.zeros(2), "array 'control/tail' has shape"),
    "type": (np.zeros(1, np.float32), "array 'control/tail' has type <f4"),
    "missing": (None, "missing ['control/tail']"),
}


@cache
def without_client_0() -> tuple[np.ndarray, np.ndarray]:
    """Return the model and c after two rounds in which its replies are lost."""
    strategy = one()
    model = train(strategy, grid(quadratics(3), fault=lose((1, 0), (2, 0))), 2)
    return model, control(strategy)


@pytest.mark.parametrize(("array", "reason"), BAD.values(), ids=BAD)
def test_a_bad_control_variate_makes_a_bad_reply(
    array: np.ndarray | None, reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    def bad(request: Message, reply: Message) -> Message:
        if request.metadata.message_type == "train" and request.metadata.dst_node_id == NODES[0]:
            content = RecordDict({k: v.copy() for k, v in reply.content.items()})
            if array is None:
                del content["arrays"]["control/tail"]
            else:
                content["arrays"]["control/tail"] = Array(array)
            reply.content = content
        return reply

    first = one()
    found = train(first, grid(quadratics(3), fault=bad), 2)
    assert reason in caplog.text
    model, c = without_client_0()
    np.testing.assert_array_equal(found, model)
    np.testing.assert_array_equal(control(first), c)


def test_c_stands_in_a_round_that_is_void_by_overflow(caplog: pytest.LogCaptureFixture) -> None:
    def huge(request: Message, reply: Message) -> Message:
        config = request.content.config_records.get("config", {})
        if config.get("server-round") == 3:
            content = RecordDict({k: v.copy() for k, v in reply.content.items()})
            content["arrays"]["tail"] = Array(np.array([1.7e308]))
            del content["config"]["checksums"]  # as if the client had come to it
            reply.content = content
        return reply

    first, other = one(), one()
    found = train(first, grid(quadratics(3), fault=huge), 3)
    assert "round 3 is skipped: the aggregated model is not finite" in caplog.text
    np.testing.assert_array_equal(found, train(other, grid(quadratics(3)), 2))
    np.testing.assert_array_equal(control(first), control(other))
