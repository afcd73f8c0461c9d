"""Laws of the server steps, around any algorithm."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from federations import descending, same_as_flowers
from flwr.app import Array, ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.server.workflow import SecAggPlusWorkflow
from flwr.serverapp import strategy as flower
from hosted import federation
from laws import START, TABLE, Row, another, local, one_of_each_mechanism, train
from problems import (
    Quadratic,
    grid,
    make_client_app,
    quadratics,
    to_record,
    to_vector,
)
from resumed import federation as kept_federation

from clients.node.in_process import InProcessGrid
from fl_strategies import BestModel, Checkpoints, FedAvg, FederatedStrategy, RoundInfo, as_legacy
from fl_strategies.parts import (
    PARTS,
    Adagrad,
    Adam,
    FedExP,
    Momentum,
    ServerStep,
    Yogi,
    parts_for,
)

STEPS: list[ServerStep] = [Momentum(), Adam(), Yogi(), Adagrad(), FedExP()]
every_step = pytest.mark.parametrize("step", STEPS, ids=str)
ROW = {row.name: row for row in TABLE}


def made(row: Row, step: ServerStep | None, **options: Any) -> FederatedStrategy:
    return row.strategy(**{"local": local(), "server_step": step, **options})


def goes(row: Row, step: ServerStep) -> bool:
    return not step.refusal(row.strategy(local=local()), row.name)


def test_no_step_is_missing_here() -> None:
    assert {*map(type, STEPS)} == {*parts_for("server_step").values()}


# ---- the equations ------------------------------------------------------------------------------


THEIRS: dict[str, tuple[Any, ServerStep]] = {
    "momentum": (
        flower.FedAvgM(fraction_evaluate=0.0, server_learning_rate=0.7, server_momentum=0.6),
        Momentum(lr=0.7, beta=0.6),
    ),
    "adam": (
        flower.FedAdam(fraction_evaluate=0.0, eta=0.3, beta_1=0.8, beta_2=0.95, tau=0.01),
        Adam(lr=0.3, beta_1=0.8, beta_2=0.95, tau=0.01, v_0=0.0, bias_correction="flower"),
    ),
    "yogi": (
        flower.FedYogi(fraction_evaluate=0.0, eta=0.3, beta_1=0.8, beta_2=0.95, tau=0.01),
        Yogi(lr=0.3, beta_1=0.8, beta_2=0.95, tau=0.01, v_0=0.0),
    ),
    "adagrad": (
        flower.FedAdagrad(fraction_evaluate=0.0, eta=0.3, tau=0.01),
        Adagrad(lr=0.3, tau=0.01, v_0=0.0),
    ),
}


@pytest.mark.parametrize("name", THEIRS)
def test_fedavg_with_a_step_is_flowers_strategy_of_its_own(name: str) -> None:
    theirs, step = THEIRS[name]
    same_as_flowers(theirs, FedAvg(fraction_evaluate=0.0, server_step=step), 3, 8)


@one_of_each_mechanism
def test_a_step_of_rate_1_without_momentum_changes_no_bit(row: Row) -> None:
    step = Momentum(lr=1.0, beta=0.0)
    if goes(row, step):
        plain, found = (train(made(row, s), grid(quadratics(3)), 3) for s in (None, step))
        np.testing.assert_array_equal(found, plain)


@every_step
def test_where_nothing_moves_nothing_moves(step: ServerStep) -> None:
    state, nothing = step.begin(None, START), np.zeros_like(START)
    for number in (1, 2, 3):
        moved, state, _ = step.step(state, START, nothing, number, lambda: 1.0)
        np.testing.assert_array_equal(moved, nothing)
        np.testing.assert_array_equal(step.shown(state, START), START)


@pytest.mark.parametrize(("name", "rounds"), [("fedavg", 20), ("scaffold", 30)])
def test_an_algorithm_with_momentum_converges_to_its_own_limit(name: str, rounds: int) -> None:
    row, step = ROW[name], Momentum(lr=0.8, beta=0.2)  # as far as without, in the long run
    problems = [Quadratic(np.sqrt(3) * q.X, np.sqrt(3) * q.y) for q in quadratics(3)]
    found = train(made(row, step), grid(problems), rounds)
    np.testing.assert_allclose(found, row.limit(problems), atol=1e-6)


ADAPTIVE = [
    Adam(lr=1.0, beta_1=0.2, beta_2=0.5, tau=1.0),
    Yogi(lr=1.0, beta_1=0.2, beta_2=0.5, tau=1.0),
    Adagrad(lr=3.0, tau=1.0),
]


@pytest.mark.parametrize(
    ("name", "step", "rounds"),
    [*zip(["fedavg", "fednova", "feddyn"], ADAPTIVE, [60, 120, 80], strict=True)],
)
@pytest.mark.sampled("fedavg")
def test_adaptive_steps_converge_to_the_algorithms_limit(
    name: str, step: ServerStep, rounds: int
) -> None:
    """Around a mean of models, a rule of sums, and one that accumulates changes."""
    problems, row = quadratics(3), ROW[name]
    found = train(made(row, step), grid(problems), rounds)
    np.testing.assert_allclose(found, row.limit(problems), atol=1e-6)


def test_fedexp_goes_by_its_equations_and_shows_the_mean_of_two_iterates() -> None:
    problems, eps, theta, before = quadratics(3), 0.3, START, START
    rates = []
    for rounds in range(1, 6):
        models = []
        for q in problems:
            w = theta
            for _ in range(3):
                w = w - 0.1 * q.gradient(w)
            models.append(w)
        p = np.array([q.n for q in problems]) / sum(q.n for q in problems)
        delta = p @ models - theta
        apart = sum(share * (w - theta) @ (w - theta) for share, w in zip(p, models, strict=True))
        e = max(1.0, apart / (2 * (delta @ delta + eps)))
        rates.append(e)
        theta, before = theta + e * delta, theta
        one = FedAvg(fraction_evaluate=0.0, server_step=FedExP(eps=eps))
        result = one.start(InProcessGrid(descending(3), 3), to_record(START), rounds)
        np.testing.assert_allclose(to_vector(result.arrays), (theta + before) / 2, rtol=1e-12)
        found = [m["server-rate"] for m in result.train_metrics_clientapp.values()]
        np.testing.assert_allclose(found, rates, rtol=1e-12)
    assert min(rates) > 1.0


def test_a_large_eps_makes_fedexp_the_plain_step_and_its_mean() -> None:
    iterates = [train(made(ROW["fedprox"], None), grid(quadratics(3)), n) for n in (3, 4)]
    found = train(made(ROW["fedprox"], FedExP(eps=1e9)), grid(quadratics(3)), 4)
    np.testing.assert_array_equal(found, (iterates[0] + iterates[1]) / 2)


# ---- who sees which model -----------------------------------------------------------------------


class Models(InProcessGrid):
    """Notes the model of each request, by the kind of request."""

    def send_and_receive(
        self, messages: Iterable[Message], *, timeout: float | None = None
    ) -> Iterable[Message]:
        sent = list(messages)
        self.seen: dict[str, list[list[float]]] = getattr(self, "seen", {})
        for message in sent[:1]:
            if "arrays" not in message.content:
                continue
            model = to_vector(message.content["arrays"]).tolist()
            self.seen.setdefault(message.metadata.message_type, []).append(model)
        return super().send_and_receive(sent, timeout=timeout)


def test_all_but_training_and_checkpoints_see_the_mean_of_two_iterates(tmp_path: Path) -> None:
    problems, tested, told = quadratics(3), [], []

    def evaluate(server_round: int, arrays: ArrayRecord) -> MetricRecord:
        tested.append(to_vector(arrays).tolist())
        return MetricRecord({"test-loss": -float(server_round)})  # the last is the best

    def note(info: RoundInfo) -> None:
        told.append(to_vector(info.arrays).tolist())

    on = Models(make_client_app(problems), 3)
    best, kept = BestModel(tmp_path / "best", smaller=True), Checkpoints(tmp_path, keep=9)
    strategy = FedAvg(
        local=local(), server_step=FedExP(eps=0.3), callbacks=[note, best], checkpoints=kept
    )
    result = strategy.start(on, to_record(START), 4, evaluate_fn=evaluate)
    saved = [kept._load(number).model for number in range(1, 5)]
    iterates = [START, *(to_vector([m["head"], m["tail"]]) for m in saved)]
    means = [((a + b) / 2).tolist() for a, b in zip(iterates[1:], iterates[:-1], strict=True)]
    assert on.seen["train"] == [w.tolist() for w in iterates[:-1]]
    assert on.seen["evaluate"] == means
    assert tested == [START.tolist(), *means]
    assert told == means
    assert to_vector(result.arrays).tolist() == means[-1]
    from safetensors.numpy import load_file

    arrays = load_file(tmp_path / "best")
    assert to_vector([arrays["head"], arrays["tail"]]).tolist() == means[-1]


# ---- rounds, states, engines --------------------------------------------------------------------


@every_step
def test_a_skipped_round_counts_no_step(step: ServerStep) -> None:
    def lost_in_rounds_2_and_3(request: Message, reply: Message) -> Message | None:
        config = request.content.config_records.get("config", {})
        return None if config.get("server-round") in (2, 3) else reply

    if isinstance(step, Adam):
        step = Adam(bias_correction="flower")
    problems, row = quadratics(4), ROW["fedavg"]
    cut = train(made(row, step), grid(problems, fault=lost_in_rounds_2_and_3), 5)
    np.testing.assert_array_equal(cut, train(made(row, step), grid(problems), 3))


@every_step
def test_buffers_get_no_step(step: ServerStep) -> None:
    """One round, in which models are the same: the server alone differs."""
    app = ClientApp()

    @app.train()
    def fit(message: Message, context: Context) -> Message:
        arrays = {n: Array(a.numpy() + 0.25) for n, a in message.content["arrays"].items()}
        metrics = MetricRecord({"num-examples": 2})
        content = RecordDict({"arrays": ArrayRecord(arrays), "metrics": metrics})
        return Message(content, reply_to=message)

    initial = {"w": np.ones(2), "running_mean": np.ones(2), "running_var": np.ones(2)}
    start = ArrayRecord({name: Array(array) for name, array in initial.items()})
    strategy = FedAvg(fraction_evaluate=0.0, server_step=step)
    found = strategy.start(InProcessGrid(app, 2), start, 1).arrays
    assert found["running_mean"].numpy().tolist() == [1.25, 1.25]
    assert found["running_var"].numpy().tolist() == [1.25, 1.25]


def test_a_checkpoint_of_another_part_is_refused(tmp_path: Path) -> None:
    def start(step: ServerStep | None) -> Any:
        one = made(ROW["fedavg"], step, checkpoints=Checkpoints(tmp_path / "checkpoints"))
        return one.start(kept_federation(tmp_path), to_record(START), 2, resume=True)

    start(Adam())
    with pytest.raises(ValueError, match=r"settings: server_step was Adam\(\), is None"):
        start(None)
    with pytest.raises(ValueError, match=r"server_step was Adam\(\), is Momentum\(\)"):
        start(Momentum())


@every_step
def test_hosts_that_send_means_change_it_by_rounding_alone(step: ServerStep) -> None:
    """FedExP's distances come from the hosts."""
    alone = train(made(ROW["fedavg"], step), grid(quadratics(6)), 3)
    strategy = made(ROW["fedavg"], step, fold="on", node_wait=0.01)
    np.testing.assert_allclose(train(strategy, federation("2 hosts"), 3), alone, rtol=1e-9)


def test_a_second_start_continues_with_what_the_step_remembers() -> None:
    whole, cut = made(ROW["fedavg"], Momentum()), made(ROW["fedavg"], Momentum())
    on = grid(quadratics(3))
    expected = train(whole, grid(quadratics(3)), 5)
    first = cut.start(on, to_record(START), 2).arrays
    np.testing.assert_array_equal(to_vector(cut.start(on, first, 3).arrays), expected)


# ---- declarations -------------------------------------------------------------------------------

OPTIONS = [
    (name, option) for name, part in PARTS.items() for option in part.declarations if part.stage
]
STEP_OPTIONS = [(n, o) for n, o in OPTIONS if issubclass(PARTS[n], ServerStep)]
OTHERS: dict[str, Any] = {"v_0": 0.3, "beta_1": 0.3, "beta_2": 0.3, "bias_correction": "flower"}


def reached(step: ServerStep) -> np.ndarray:
    """Return where three steps lead whose aggregated model is half as far from the origin."""
    theta, state = START, step.begin(None, START)
    for number in (1, 2, 3):
        moved, state, _ = step.step(state, theta, -theta / 2, number, lambda: 99.0)
        theta = theta + moved
    return theta


@pytest.mark.parametrize(("name", "option"), STEP_OPTIONS)
def test_every_hyperparameter_of_a_step_matters(name: str, option: str) -> None:
    declared = PARTS[name].declarations[option]
    value = OTHERS.get(option) or another(option, declared, declared.default)
    plain, changed = (reached(PARTS[name](**given)) for given in ({}, {option: value}))
    assert np.abs(plain - changed).max() > 1e-6
    if declared.scheduled:
        found = reached(PARTS[name](**{option: {1: declared.default, 3: value}}))
        assert np.abs(found - plain).max() > 1e-6
        assert np.abs(found - changed).max() > 1e-6


@pytest.mark.parametrize(
    ("algorithm", "options", "step", "said"),
    [
        ("fedadmm", {"eta": "fraction"}, Momentum(), "use FedADMM with a number for eta"),
        ("fedbcd-async", {}, Adam(), "from what the server keeps"),
        ("fednova", {}, FedExP(), "does not take the mean of uploaded models"),
        ("feddyn", {}, FedExP(), "use FedAvg, FedProx or another"),
    ],
)
def test_a_step_that_does_not_fit_is_refused_with_what_to_use(
    algorithm: str, options: dict[str, Any], step: ServerStep, said: str
) -> None:
    text = rf"^server_step={re.escape(repr(step))} does not go with \w+: .*{said}"
    with pytest.raises(ValueError, match=text):
        made(ROW[algorithm], step, **options)


def test_a_wrapper_is_refused_as_a_step_scales_its_noise() -> None:
    wrapper = flower.DifferentialPrivacyServerSideFixedClipping(
        FedAvg(fraction_evaluate=0.0, server_step=Momentum()), 0.0, 1.0, 3
    )
    with pytest.raises(ValueError, match=r"^FedAvg with server_step=Momentum\(\) cannot be run by"):
        wrapper.start(grid(quadratics(3)), to_record(START), 1)


def test_masks_hide_what_fedexp_needs_and_nothing_that_momentum_does() -> None:
    secure = SecAggPlusWorkflow(1.0, 0.5)
    with pytest.raises(ValueError, match=r"^FedAvg with server_step=FedExP\(\) does not work with"):
        as_legacy(FedAvg(server_step=FedExP()), to_record(START), secure=secure)
    as_legacy(FedAvg(server_step=Momentum()), to_record(START), secure=secure)
