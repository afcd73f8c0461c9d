"""q-FedAvg: its rule by matrices, its objective, Flower's own QFedAvg, and the loss it goes by."""

from __future__ import annotations

from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import ConfigRecord, Message, MetricRecord, RecordDict
from flwr.serverapp.strategy import QFedAvg as FlowerQFedAvg
from laws import RATE, START, STEPS, local, quiet, train
from problems import DIM, NODES, Quadratic, grid, quadratics, to_record, to_vector
from torch import nn
from torch.nn.functional import cross_entropy

from clients import Border, LocalTraining, Problem, QFedAvgClient
from fl_strategies import FedAvg, QFedAvg, RoundInfo, q_fedavg
from fl_strategies.core.schedules import at

one = partial(quiet, QFedAvg)


def by_hand(
    problems: list[Quadratic], rounds: int, *, q: Any, lr: Any = RATE, steps: int = STEPS
) -> np.ndarray:
    """Return the model after ``rounds``: the paper's Algorithm 2 on vectors."""
    theta = START
    for number in range(1, rounds + 1):
        power, rate = at(q, number), at(lr, number)
        up, h = [], []
        for problem in problems:
            shrink = np.linalg.matrix_power(np.eye(DIM) - rate * problem.A, steps)
            w = problem.b + shrink @ (theta - problem.b)
            F, delta = problem.value(theta), (theta - w) / rate
            up.append(F**power * delta)
            h.append(power * F ** (power - 1) * np.linalg.norm(delta) ** 2 + F**power / rate)
        theta = theta - np.sum(up, axis=0) / np.sum(h)
    return theta


@pytest.mark.parametrize("q", [0.0, 0.3, 1.0, 2.5, {1: 1.0, 3: 2.0}], ids=str)
@pytest.mark.parametrize("lr", [RATE, {1: 0.2, 3: 0.05}], ids=["fixed", "scheduled"])
def test_rounds_are_the_papers_algorithm(q: Any, lr: Any) -> None:
    problems = quadratics(3)
    found = train(one(q=q, local=local(lr=lr)), grid(problems), 4)
    np.testing.assert_allclose(found, by_hand(problems, 4, q=q, lr=lr), rtol=1e-8)


def test_with_q_zero_it_is_fedavg_with_uniform_weights() -> None:
    """Its step is 1/sum h = lr/|S|, so that the mean of Delta takes theta to the mean of w."""
    options = {"fraction_train": 0.5, "seed": 2}
    uniform = FedAvg(weights="uniform", fraction_evaluate=0.0, local=local(), **options)
    found = train(one(q=0.0, **options), grid(quadratics(6)), 5)
    np.testing.assert_allclose(found, train(uniform, grid(quadratics(6)), 5), rtol=1e-12)


@pytest.mark.parametrize("q", [0.0, 0.1, 2.0])
@pytest.mark.slow
def test_q_fedavg_agrees_with_flowers_own_class_on_our_clients(q: float) -> None:
    settings = local(lr=0.15)
    flowers = FlowerQFedAvg(
        client_learning_rate=0.15,
        q=q,
        train_loss_key="global-loss",
        min_train_nodes=3,
        min_available_nodes=3,
        fraction_evaluate=0.0,
    )
    config = ConfigRecord({"algorithm": "q-fedavg", **settings})
    theirs = flowers.start(grid(quadratics(3)), to_record(START), 4, train_config=config).arrays
    ours = train(one(q=q, local=settings), grid(quadratics(3)), 4)
    np.testing.assert_allclose(ours, to_vector(theirs), rtol=1e-11)


@pytest.mark.parametrize("q", [0.5, 2.0])
@pytest.mark.sampled("2.0")
def test_with_one_step_it_goes_down_on_its_objective_to_where_its_gradient_is_zero(
    q: float,
) -> None:
    """No step overshoots where lr <= 1/L, here 0.4: h bounds the curvature of F^(q+1)."""
    problems, values = quadratics(3), []

    def measure(info: RoundInfo) -> None:
        theta = to_vector(info.arrays)
        values.append(sum(p.value(theta) ** (q + 1) / (q + 1) for p in problems))

    strategy = one(q=q, local=local(lr=0.4, epochs=1), callbacks=[measure])
    theta = train(strategy, grid(problems), 150)
    assert all(after <= before * (1 + 1e-12) for before, after in pairwise(values))
    slopes = np.array([p.value(theta) ** q * p.gradient(theta) for p in problems])
    assert np.abs(slopes.sum(axis=0)).max() < 1e-6 * np.abs(slopes).max()


@pytest.mark.slow
def test_a_larger_q_evens_out_the_losses() -> None:
    problems = quadratics(3)
    models = [train(one(q=q), grid(problems), 40) for q in (0.0, 1.0, 4.0)]
    losses = [np.array([p.value(theta) for p in problems]) for theta in models]
    for less, more in pairwise(losses):
        assert more.max() < less.max() - 0.1
        assert more.var() < 0.9 * less.var()


def test_the_loss_is_the_received_models_on_all_examples_and_weighs_its_client() -> None:
    problems, rows = quadratics(3), {}

    def listen(info: RoundInfo) -> None:
        rows.update(info.clients)

    strategy = one(q=2.0, callbacks=[listen], local=local(solver="sgd", **{"batch-size": 2}))
    strategy.start(grid(problems), to_record(START), 1)
    losses = np.array([q.value(START) for q in problems])
    shares = losses**2 / (losses**2).sum()
    for i in range(3):
        assert rows[i]["global-loss"] == pytest.approx(losses[i], rel=1e-12)
        assert rows[i]["weight-share"] == pytest.approx(shares[i], rel=1e-8)


def test_the_history_weighs_clients_by_the_rounds_own_q() -> None:
    rows: dict[int, dict[str, float]] = {}
    strategy = one(q={1: 0.0, 2: 2.0}, callbacks=[lambda info: rows.update(info.clients)])
    strategy.start(grid(quadratics(3)), to_record(START), 2)
    losses = np.array([rows[i]["global-loss"] for i in range(3)])
    found = [rows[i]["weight-share"] for i in range(3)]
    np.testing.assert_allclose(found, losses**2 / (losses**2).sum(), rtol=1e-8)


def test_the_loss_is_measured_without_dropout_and_with_running_statistics() -> None:
    rng = np.random.default_rng(0)
    module = nn.Sequential(nn.BatchNorm1d(4), nn.Dropout(0.5), nn.Linear(4, 3)).double()
    x, y = torch.tensor(rng.normal(2.0, 3.0, (9, 4))), torch.tensor(rng.integers(0, 3, 9))
    model = Border(module)
    arrays = model.arrays(model.vector)
    client = QFedAvgClient(
        Problem(model, cross_entropy, x, y), client_id=0, training=LocalTraining(lr=0.3)
    )
    _, _, metrics = client.fit(arrays, {"server-round": 1, "seed": 1})
    model.load(arrays)
    linear = module[2]
    plain = cross_entropy(linear(x / np.sqrt(1 + 1e-5)), y)  # mean 0 and variance 1 at first
    assert metrics["global-loss"] == pytest.approx(float(plain.detach()), rel=1e-9)
    assert metrics["lr"] == 0.3


def test_a_client_without_loss_neither_breaks_a_round_nor_weighs() -> None:
    zero = Quadratic(np.eye(DIM), START)  # theta is its minimiser, and its loss there 0
    (q,) = quadratics(1)
    for power in (0.5, 1.0, 2.0):
        alone = train(one(q=power), grid([q]), 1)
        np.testing.assert_allclose(train(one(q=power), grid([q, zero]), 1), alone, rtol=1e-4)


@pytest.mark.parametrize(
    ("metric", "value"), [("global-loss", -0.5), ("global-loss", 1e13), ("lr", 0.0)]
)
def test_an_absurd_loss_or_rate_makes_a_bad_reply(
    metric: str, value: float, caplog: pytest.LogCaptureFixture
) -> None:
    def absurd(request: Message, reply: Message) -> Message:
        if request.metadata.message_type == "train" and request.metadata.dst_node_id == NODES[0]:
            content = RecordDict(dict(reply.content.items()))
            content["metrics"] = MetricRecord({**content["metrics"], metric: value})
            reply.content = content
        return reply

    result = one().start(grid(quadratics(2), fault=absurd), to_record(START), 1)
    assert result.train_metrics_clientapp[1]["clients-rejected"] == 1
    assert f"metric '{metric}' must be in [" in caplog.text


def test_the_rule_writes_to_nothing_and_takes_any_order() -> None:
    rng = np.random.default_rng(4)
    theta, ws = rng.normal(size=DIM), rng.normal(size=(3, DIM))
    given = theta.copy(), ws.copy()
    uploads = [q_fedavg.Local(w, 0.5 + i, 0.1) for i, w in enumerate(ws)]
    found = q_fedavg.server_rule(theta, uploads, q=1.5)
    np.testing.assert_allclose(q_fedavg.server_rule(theta, uploads[::-1], q=1.5), found, rtol=1e-13)
    np.testing.assert_array_equal(theta, given[0])
    np.testing.assert_array_equal(ws, given[1])


@pytest.mark.parametrize("loss", [0.0, 1e-4, 1.0])
def test_the_steepest_weight_of_any_loss_is_a_number(loss: float) -> None:
    theta, w = np.array([1.0, 2.0]), np.array([0.5, 1.0])
    found = q_fedavg.server_rule(theta, [q_fedavg.Local(w, loss, 0.1)], q=q_fedavg.STEEPEST)
    assert np.isfinite(found).all()
    assert (found != theta).any()


@pytest.mark.parametrize("q", [-0.1, {1: 1.0, 4: -1.0}, float("nan"), 30.5])
def test_a_bad_q_is_refused_with_bound_and_value(q: Any) -> None:
    with pytest.raises(ValueError, match=r"q must be .*>= 0 and <= 30.*, got (-0.1|-1.0|nan|30.5)"):
        QFedAvg(q=q)
