"""Training loops of one's own: what our loop gives, for every rule that can be run around a loop.

Mistakes these laws are written against: a start, terms or an end that a rule does not get,
statistics of a model that does not travel, a state that survives a lost reply, seeds that repeat,
settings that nobody reads, FedAvg under another name.
"""

from __future__ import annotations

import copy
import functools
import random
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from federations import drop
from flwr.app import ArrayRecord, Message
from laws import START, TABLE, Row, local, train
from limits import RATE, STEPS
from own_loops import descend, own_app
from problems import (
    Linear,
    Quadratic,
    grid,
    half_mean_square,
    make_client_app,
    optimum,
    quadratics,
)
from test_pages import imported_directives
from torch import nn
from torch.optim import SGD, Adam

from clients import (
    AnyAlgorithmClient,
    Border,
    ContextStore,
    DirectoryStore,
    InProcessGrid,
    LocalTraining,
    OwnTraining,
    Problem,
    client_app,
    client_id,
)
from fl_strategies import (
    SCAFFOLD,
    Checkpoints,
    Ditto,
    FedADMM,
    FedAvg,
    FedBC,
    FedBCD,
    FedNova,
    FedPD,
    FedProx,
    RoundInfo,
)
from fl_strategies.parts import Adam as AdamStep
from fl_strategies.parts import Buffered, Clock, Deadline, TopK

ROW = {row.name: row for row in TABLE}
RUN = (
    "fedavg", "fedprox", "fednova", "scaffold", "fedadmm", "feddyn", "a-fedpd", "fedpd", "fedbc",
    "fedbcd", "fedbcd-i", "fedbcd-async", "fedbcd-i-async", "ditto", "fedrep", "fedbabu",
    "fedamp",
)  # fmt: skip
"""The algorithms that run around a loop."""
OTHERS: dict[str, dict[str, Any]] = {
    "fedpd": {"p": 0.5},
    "fednova": {"mu": 0.3},
    "fedbcd": {"zeta": 0.6, "box": 3.2},
    "fedbcd-i": {"zeta": 0.6, "box": 3.2},
    "fedbc": {"local_start": "client"},
}
MOMENTUM = {"fednova", "scaffold", "fedavg", "fedadmm"}


def both_doors(row: Row, rounds: int, momentum: float = 0.0, **options: Any) -> list[np.ndarray]:
    """Return the models after ``rounds`` with our loop and with a loop of one's own."""
    problems, ends = quadratics(4), []
    loop = functools.partial(descend, momentum=momentum)
    settings = local(**({"momentum": momentum} if momentum else {}))
    for app, how in ((make_client_app(problems), settings), (own_app(problems, loop), {})):
        fault = drop(0.3) if row.partial else None
        strategy = row.strategy(local=how, node_wait=0.01, **OTHERS.get(row.name, {}) | options)
        ends.append(train(strategy, InProcessGrid(app, 4, fault=fault), rounds))
    return ends


@pytest.mark.parametrize("name", RUN)
def test_a_loop_of_ones_own_gives_what_our_loop_gives(name: str) -> None:
    """Some clients a round, and replies are lost."""
    row = ROW[name]
    options = {"fraction_train": 0.75} if row.partial else {}
    ours, own = both_doors(row, 5, 0.9 if name in MOMENTUM else 0.0, **options)
    np.testing.assert_allclose(own, ours, rtol=1e-11)
    assert np.abs(own - START).max() > 0.1


@pytest.mark.parametrize("kept", [True, False])
def test_what_a_loop_thaws_gets_the_terms_too(kept: bool) -> None:
    """The head is frozen until round 3 and after each training; so is one that is made anew."""
    problems, problem_of = quadratics(2), dict[int, OwnTraining]()

    def thaws(module: Any, client: int, config: Any) -> None:
        module.head.requires_grad_(config["server-round"] > 2)
        optimizer = torch.optim.SGD(module.parameters(), 0.1)
        for _ in range(3):
            optimizer.zero_grad()
            half_mean_square(module(X[client]), Y[client]).backward()
            optimizer.step()
        module.head.requires_grad_(False)

    X, Y = (
        [torch.tensor(a) for a in part]
        for part in zip(*((q.X, q.y) for q in problems), strict=True)
    )

    def client_fn(context: Any) -> AnyAlgorithmClient:
        me = client_id(context)
        made = OwnTraining(Linear(), lambda module, config: thaws(module, me, config), 3)
        return AnyAlgorithmClient(problem_of.setdefault(me, made) if kept else made)

    strategy = FedADMM(rho=1.0, fraction_evaluate=0.0)
    found = train(strategy, InProcessGrid(client_app(client_fn), 2), 4)
    w, y, theta = [START] * 2, [0 * START] * 2, START
    for round in range(1, 5):
        for i, q in enumerate(problems):
            v = w[i].copy()
            for _ in range(3):
                step = q.gradient(v) + y[i] + (v - theta)
                v = v - 0.1 * np.where([round > 2] * 4 + [True], step, 0.0)
            y[i], w[i] = y[i] + (v - theta), v
        theta = np.mean([a + b for a, b in zip(w, y, strict=True)], axis=0)
    np.testing.assert_allclose(found, theta, rtol=1e-11)


def test_the_table_of_what_runs_around_a_loop_is_what_the_rules_ask_for() -> None:
    found = {row.name: imported_directives().around_a_loop(row.name) for row in TABLE}
    assert {name for name, misses in found.items() if not misses} == {*RUN}
    page = (Path(__file__).parents[1] / "notebooks/pages/flower-app.md").read_text()
    (read_as_a_file,) = re.findall(r"```\{around-loops\}\n(.*?)\n```", page, re.DOTALL)
    assert {*re.findall(r"[\w-]+", read_as_a_file)} == {*RUN}
    assert found["fedsgd"].startswith("solver = 'gd'")  # FedAvg with one step on all samples
    assert found["per-fedavg"] == "the number of its steps"
    assert found["moon"] == "training on another loss"
    assert found["pfedme"] == "the number of its steps"
    assert found["q-fedavg"] == "the loss on all training samples"


def no_loop(module: nn.Module, config: Any, q: Quadratic) -> None:
    raise AssertionError("nothing is to be trained")


@pytest.mark.parametrize(
    ("name", "options", "misses"),
    [
        ("scaffold", {"option": "I"}, "a gradient on all samples"),
        ("q-fedavg", {}, "the loss on all training samples"),
        ("moon", {}, "training on another loss"),
    ],
)
def test_what_a_rule_misses_is_said_before_anything_is_trained(
    name: str, options: dict[str, Any], misses: str, caplog: pytest.LogCaptureFixture
) -> None:
    strategy = ROW[name].strategy(local={}, node_wait=0.01, **options)
    train(strategy, InProcessGrid(own_app(quadratics(2), no_loop), 2), 1)
    assert (
        f"{name} asks its clients for {misses}, which a training loop of one's own" in caplog.text
    )


def test_scaffold_with_momentum_reaches_the_optimum() -> None:
    """With our loop; by the first law, with one of one's own as well."""
    problems = quadratics(3)
    settings = local(lr=0.1, epochs=3, momentum=0.9)
    strategy = SCAFFOLD(fraction_evaluate=0.0, local=settings, eta_g=0.7)
    found = train(strategy, grid(problems), 65)
    np.testing.assert_allclose(found, optimum(problems), atol=1e-9)


def test_fednova_divides_by_what_momentum_steps_of_unequal_number_add_up_to() -> None:
    """(theta - w_i)/a_i is lr times a mean gradient: with a first step alone, the gradient."""
    problems, seen = quadratics(3), list[RoundInfo]()

    def loop(module: nn.Module, config: Any, q: Quadratic) -> None:
        descend(module, config, q, steps=q.n // 2, momentum=0.9)

    strategy = FedNova(fraction_evaluate=0.0, callbacks=[seen.append])
    train(strategy, InProcessGrid(own_app(problems, loop), 3), 1)
    for client, q in enumerate(problems):
        went, v = 0.0, 0.0
        for _ in range(q.n // 2):
            v = 0.9 * v + 1.0
            went += v
        assert seen[0].clients[client]["normalizer"] == pytest.approx(went, rel=1e-12)


def test_an_optimizer_whose_steps_are_not_known_to_add_up_is_refused_by_name(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def loop(module: nn.Module, config: Any, q: Quadratic) -> None:
        Adam(module.parameters()).step()

    train(SCAFFOLD(fraction_evaluate=0.0), InProcessGrid(own_app(quadratics(1), loop), 1), 1)
    assert "scaffold asks its clients for what its steps add up to" in caplog.text
    assert "the training loop steps Adam" in caplog.text


def test_an_optimizer_that_maximizes_the_negative_loss_gets_the_terms_so() -> None:
    def ascend(module: nn.Module, config: Any, q: Quadratic) -> None:
        optimizer = SGD(module.parameters(), RATE, maximize=True)
        for _ in range(STEPS):
            optimizer.zero_grad()
            (-half_mean_square(module(torch.tensor(q.X)), torch.tensor(q.y))).backward()
            optimizer.step()

    ends = [
        train(
            FedADMM(rho=1.0, fraction_evaluate=0.0),
            InProcessGrid(own_app(quadratics(2), loop), 2),
            3,
        )
        for loop in (ascend, descend)
    ]
    np.testing.assert_allclose(*ends, rtol=1e-12)


# ---- the config and its seed --------------------------------------------------------------------


def test_each_call_has_a_seed_of_run_round_and_client_and_leaves_no_trace() -> None:
    seen: dict[tuple[str, int, int, int], tuple[float, ...]] = {}
    seeds: list[int] = []

    def draw(kind: str, config: Any, q: Quadratic) -> None:
        drawn = float(torch.rand(())), float(np.random.rand()), random.random()  # noqa: NPY002
        seen[kind, run, config["server-round"], q.n] = drawn

    def loop(module: nn.Module, config: Any, q: Quadratic) -> None:
        draw("train", config, q)
        seeds.append(config["seed"])
        config["lr"] = 9.0  # of this call alone
        descend(module, config, q)

    def test(module: nn.Module, config: Any, q: Quadratic) -> float:
        draw("evaluate", config, q)
        return 0.0

    random.seed(5)
    np.random.seed(5)  # noqa: NPY002
    torch.manual_seed(5)
    for run in (1, 2, 1):
        before = dict(seen)
        one = FedProx(seed=run, local={"lr": 0.1})
        train(one, InProcessGrid(own_app(quadratics(2), loop, test=test), 2), 2)
        assert all(seen[key] == value for key, value in before.items())
    for drawn in zip(*seen.values(), strict=True):
        assert len({*drawn}) == len(seen) == 16
    assert len({*seeds}) == 8
    assert all(0 <= seed < 2**32 for seed in seeds)
    after = float(torch.rand(())), float(np.random.rand()), random.random()  # noqa: NPY002
    random.seed(5)
    np.random.seed(5)  # noqa: NPY002
    torch.manual_seed(5)
    assert after == (float(torch.rand(())), float(np.random.rand()), random.random())  # noqa: NPY002


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("solver", "adam"), ("solver-params", "dampening=0.1"), ("sam", 0.1), ("box", 1.0),
        ("variance-reduction", "svrg"), ("residual", 0.0), ("random-epochs", True),
        ("extrapolation", 0.3), ("fine-tune", "train"),
    ],
)  # fmt: skip
def test_settings_of_our_loop_are_refused_before_training(
    setting: str, value: Any, caplog: pytest.LogCaptureFixture
) -> None:
    app = own_app(quadratics(1), no_loop)
    settings = {setting: value} | ({"solver": "sgd"} if setting == "solver-params" else {})
    train(FedAvg(fraction_evaluate=0.0, local=settings), InProcessGrid(app, 1), 1)
    assert re.search(rf"does not use .*{setting} = ", caplog.text)


def test_a_deadline_that_cuts_work_is_refused(caplog: pytest.LogCaptureFixture) -> None:
    clock, pace = Clock(step=0.1), Deadline(seconds=1.0, cut=True)
    strategy = FedAvg(fraction_evaluate=0.0, clock=clock, pace=pace)
    train(strategy, InProcessGrid(own_app(quadratics(1), no_loop), 1), 1)
    assert "does not use step-limit = " in caplog.text


def test_settings_that_the_loop_is_to_use_are_in_its_config() -> None:
    seen = []

    def loop(module: nn.Module, config: Any, q: Quadratic) -> None:
        seen.append((config["lr"], config["epochs"], config["batch-size"]))

    settings = {"lr": 0.3, "epochs": 7, "batch-size": 5}
    train(
        FedAvg(fraction_evaluate=0.0, local=settings),
        InProcessGrid(own_app(quadratics(1), loop), 1),
        1,
    )
    assert seen == [(0.3, 7, 5)]


def test_training_settings_of_a_client_are_refused() -> None:
    problem = OwnTraining(Linear(), print, 3)
    with pytest.raises(ValueError, match="training says how a Problem is trained"):
        AnyAlgorithmClient(problem, client_id=0, training=LocalTraining())


# ---- what a loop reports ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("result", "reported"),
    [
        (None, {}),
        (0.25, {"train-loss": 0.25}),
        (torch.tensor(0.25), {"train-loss": 0.25}),
        ({"f1": np.float32(0.5), "epochs": 3}, {"f1": 0.5, "epochs": 3}),
    ],
    ids=str,
)
def test_what_a_loop_returns_is_reported(result: Any, reported: dict[str, float]) -> None:
    seen = list[RoundInfo]()

    def loop(module: nn.Module, config: Any, q: Quadratic) -> Any:
        descend(module, config, q)
        return result

    strategy = FedADMM(fraction_evaluate=0.0, callbacks=[seen.append])
    train(strategy, InProcessGrid(own_app(quadratics(1), loop), 1), 1)
    found = seen[0].clients[0]
    assert {name: found.get(name) for name in reported} == reported
    assert found["steps"] == 4


@pytest.mark.parametrize("result", ["good", (0.5, 3), {"name": "text"}, {3: 0.5}])
def test_what_is_no_number_is_refused(result: Any, caplog: pytest.LogCaptureFixture) -> None:
    app = own_app(quadratics(1), lambda module, config, q: result)
    train(FedAvg(fraction_evaluate=0.0), InProcessGrid(app, 1), 1)
    assert "train must return None, a number or numbers by name, got" in caplog.text


@pytest.mark.parametrize("name", ["lambda", "num-examples", "device"])
def test_a_name_of_the_algorithms_or_the_clients_numbers_is_refused(
    name: str, caplog: pytest.LogCaptureFixture
) -> None:
    app = own_app(quadratics(1), lambda module, config, q: {name: 1.0})
    train(FedBC(fraction_evaluate=0.0), InProcessGrid(app, 1), 1)
    assert f"train must not return numbers ['{name}'], which the client of fedbc" in caplog.text


def test_k_counts_steps_unless_the_loop_counts_epochs() -> None:
    for result, work in ((None, 4), ({"epochs": 2}, 2)):
        seen = list[RoundInfo]()

        def loop(module: nn.Module, config: Any, q: Quadratic, result: Any = result) -> Any:
            descend(module, config, q)
            return result

        options: dict[str, Any] = {"box": None, "local": {"epochs": 4}}
        strategy = FedBCD(fraction_evaluate=0.0, callbacks=[seen.append], **options)
        train(strategy, InProcessGrid(own_app(quadratics(1), loop), 1), 1)
        assert seen[0].clients[0]["work"] == work


# ---- evaluation ---------------------------------------------------------------------------------


@pytest.mark.parametrize("evaluate_own", [True, False])
def test_the_personalized_model_is_evaluated_by_the_same_function_where_there_is_one(
    evaluate_own: bool,
) -> None:
    """Its metrics are those of our loop; a newcomer is evaluated once."""
    problems, metrics = quadratics(3), []
    own = own_app(problems, evaluate_own=evaluate_own)
    for app, settings in ((make_client_app(problems), local()), (own, {})):
        strategy = Ditto(fraction_train=0.5, local=settings, node_wait=0.01)
        on = InProcessGrid(app, 3)
        result = strategy.start(on, grid_start(), 2)
        metrics.append(result.evaluate_metrics_clientapp[2])
    ours, theirs = metrics
    names = {"eval-loss", "own-loss"} if evaluate_own else {"eval-loss"}
    for name in names:
        assert theirs[name] == pytest.approx(ours[name], rel=1e-12)
    assert theirs["eval-doubled"] == pytest.approx(2 * ours["eval-loss"], rel=1e-12)
    assert ("own-doubled" in theirs) == evaluate_own


def grid_start() -> ArrayRecord:
    return ArrayRecord(Linear().state_dict())


@pytest.mark.parametrize(
    ("result", "message"),
    [({"accuracy": 0.5}, "evaluate must return a number 'loss'"), (None, "number 'loss'")],
)
def test_an_evaluation_without_a_loss_is_refused(result: Any, message: str) -> None:
    problem = OwnTraining(Linear(), print, 3, evaluate=lambda module, config: result)
    client = AnyAlgorithmClient(problem, client_id=0)
    with pytest.raises(ValueError, match=message):
        client.evaluate([START[:4].reshape(2, 2), START[4:]], {})


# ---- modules ------------------------------------------------------------------------------------


def batch_norm_net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(2, 3, 3), nn.BatchNorm2d(3), nn.Flatten(), nn.Linear(12, 2)
    ).double()


IMAGES = torch.randn(8, 2, 4, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(4))
LABELS = torch.arange(8) % 2


def cnn_loop(module: nn.Module, config: Any) -> None:
    optimizer = SGD(module.parameters(), 0.1)
    for _ in range(3):
        optimizer.zero_grad()
        nn.functional.cross_entropy(module(IMAGES), LABELS).backward()
        optimizer.step()


@pytest.mark.parametrize("share", [None, "!3", ["!1"]], ids=["all", "FedPer", "FedBN"])
@pytest.mark.parametrize("algorithm", [FedADMM, Ditto])
def test_statistics_and_arrays_that_stay_at_home_are_as_with_our_loop(
    algorithm: Any, share: Any
) -> None:
    """Ditto's second training leaves no trace in either."""
    ends, kept = [], []
    for own in (False, True):

        def client_fn(context: Any, own: bool = own) -> Any:
            if own:
                problem: Any = OwnTraining(Border(batch_norm_net(), share=share), cnn_loop, 8)
            else:
                model = Border(batch_norm_net(), share=share)
                problem = Problem(model, nn.functional.cross_entropy, IMAGES, LABELS)
            store = ContextStore(context)
            return AnyAlgorithmClient(problem, client_id=client_id(context), store=store)

        on = InProcessGrid(client_app(client_fn), 2, fault=drop(0.3))
        how = {} if own else {"solver": "gd", "lr": 0.1, "epochs": 3}
        strategy = algorithm(fraction_evaluate=0.0, local=how)
        initial = ArrayRecord(batch_norm_net().state_dict())
        ends.append(strategy.start(on, initial, 3).arrays)
        kept.append([dict(c.state) for c in on.client_contexts()])
    for name, array in ends[0].items():
        np.testing.assert_allclose(ends[1][name].numpy(), array.numpy(), rtol=1e-9, atol=1e-12)


def test_the_module_is_the_users_own_and_its_filters_stay_as_they_are() -> None:
    module = batch_norm_net()
    places = [p.data_ptr() for p in module.parameters()]
    problem = OwnTraining(module, cnn_loop, 8)
    client = AnyAlgorithmClient(problem, client_id=0)
    arrays = [t.numpy().copy() for t in module.state_dict().values()]
    client.fit(arrays, {"server-round": 1})
    assert [p.data_ptr() for p in module.parameters()] == places
    assert module[0].weight.is_contiguous()


def test_a_loop_on_a_copy_is_an_error_where_the_algorithm_has_terms(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def loop(module: nn.Module, config: Any, q: Quadratic) -> None:
        descend(copy.deepcopy(module), config, q)

    app = own_app(quadratics(1), loop)
    train(FedProx(fraction_evaluate=0.0), InProcessGrid(app, 1), 1)
    assert "no optimizer stepped the attached module's parameters; 4 steps were" in caplog.text


@pytest.mark.parametrize("strategy", [FedAvg, FedADMM])
def test_a_parameter_that_the_loop_replaces_is_an_error(
    strategy: Any, caplog: pytest.LogCaptureFixture
) -> None:
    def loop(module: nn.Module, config: Any, q: Quadratic) -> None:
        module.tail = nn.Parameter(module.tail.detach().clone())
        descend(module, config, q)

    app = own_app(quadratics(1), loop)
    train(strategy(fraction_evaluate=0.0), InProcessGrid(app, 1), 1)
    assert "parameters ['tail'] of the module were replaced" in caplog.text


def by_hand(module: nn.Module, config: Any, q: Quadratic) -> None:
    SGD([module.head], 0.1).step()
    module.tail.data.add_(1.0)


def with_an_old_momentum(module: nn.Module, config: Any, q: Quadratic) -> None:
    optimizer = SGD(module.parameters(), 0.1, momentum=0.9)
    for p in module.parameters():
        optimizer.state[p]["momentum_buffer"] = torch.ones_like(p)
    module(torch.tensor(q.X)).sum().backward()
    optimizer.step()


def unfreezing(module: nn.Module, config: Any, q: Quadratic) -> None:
    descend(module.requires_grad_(True), config, q)


def frozen_tail() -> nn.Module:
    module = Linear()
    module.tail.requires_grad_(False)
    return module


@pytest.mark.parametrize(
    ("strategy", "loop", "module", "said"),
    [
        (FedADMM, by_hand, Linear, "the training loop changed ['tail'], and no optimizer stepped"),
        (SCAFFOLD, with_an_old_momentum, Linear, "the optimizer's momentum is from before"),
        (FedAvg, unfreezing, frozen_tail, "['tail'] changed, and arrays that require no gradients"),
    ],
)
def test_training_that_would_be_lost_or_without_the_terms_is_an_error(
    strategy: Any, loop: Any, module: Any, said: str, caplog: pytest.LogCaptureFixture
) -> None:
    app = own_app(quadratics(1), loop, module=module)
    strategy(fraction_evaluate=0.0).start(
        InProcessGrid(app, 1), ArrayRecord(Linear().state_dict()), 1
    )
    assert said in caplog.text


def test_a_parameter_that_no_optimizer_has_stays_where_it_is() -> None:
    def loop(module: nn.Module, config: Any, q: Quadratic) -> None:
        optimizer = SGD([module.head], RATE)
        for _ in range(STEPS):
            module.zero_grad()
            half_mean_square(module(torch.tensor(q.X)), torch.tensor(q.y)).backward()
            optimizer.step()

    for strategy in (FedADMM(), FedBCD(zeta=0.6, box=None)):
        found = train(strategy, InProcessGrid(own_app(quadratics(2), loop), 2), 3)
        assert np.abs(found[:4] - START[:4]).max() > 0.01
        np.testing.assert_allclose(found[4:], START[4:], rtol=1e-12)
        assert strategy.run.faults == {}


def restored(module: nn.Module, config: Any, q: Quadratic) -> None:
    """Train, and go back to the state before the last step, as early stopping does."""
    descend(module, config, q, steps=2)
    best = copy.deepcopy(module.state_dict())
    descend(module, config, q, steps=1)
    module.load_state_dict(best)


def restored_by_data(module: nn.Module, config: Any, q: Quadratic) -> None:
    descend(module, config, q, steps=2)
    module.tail.data.add_(1.0)


def restored_between(module: nn.Module, config: Any, q: Quadratic) -> None:
    restored(module, config, q)
    descend(module, config, q, steps=1)


def begun_elsewhere(module: nn.Module, config: Any, q: Quadratic) -> None:
    module.tail.data.add_(1.0)
    descend(module, config, q, steps=1)


@pytest.mark.parametrize(
    ("loop", "when"),
    [
        (begun_elsewhere, "before its first step"),
        (restored, "after its last step"),
        (restored_by_data, "after its last step"),
        (restored_between, "between two steps"),
    ],
)
@pytest.mark.parametrize("strategy", [FedNova, SCAFFOLD, functools.partial(FedBCD, box=None)])
def test_weights_that_no_step_made_are_an_error_where_a_rule_counts_on_the_steps(
    strategy: Any, loop: Any, when: str, caplog: pytest.LogCaptureFixture
) -> None:
    train(strategy(fraction_evaluate=0.0), InProcessGrid(own_app(quadratics(1), loop), 1), 1)
    assert f"the training loop changed the model {when}" in caplog.text


def test_restored_weights_are_what_other_rules_upload() -> None:
    ends = [
        train(FedADMM(fraction_evaluate=0.0), InProcessGrid(own_app(quadratics(2), loop), 2), 3)
        for loop in (restored, functools.partial(descend, steps=2))
    ]
    np.testing.assert_array_equal(*ends)


# ---- the bound on steps -------------------------------------------------------------------------


@pytest.mark.parametrize("swallows", [False, True])
def test_a_loop_that_takes_more_than_max_steps_is_stopped(
    swallows: bool, caplog: pytest.LogCaptureFixture
) -> None:
    def loop(module: nn.Module, config: Any, q: Quadratic) -> None:
        try:
            descend(module, config, q, steps=10)
        except ValueError:
            if not swallows:
                raise

    app = own_app(quadratics(1), loop, max_steps=6)
    train(FedAvg(fraction_evaluate=0.0), InProcessGrid(app, 1), 1)
    assert "takes more than 6 optimizer steps" in caplog.text


def test_the_bound_is_of_a_request_with_all_its_trainings(caplog: pytest.LogCaptureFixture) -> None:
    app = own_app(quadratics(1), max_steps=7)
    train(Ditto(fraction_evaluate=0.0), InProcessGrid(app, 1), 1)
    assert "takes more than 3 optimizer steps" in caplog.text  # the second of two with 4 steps


# ---- around it ----------------------------------------------------------------------------------


PARTS: dict[str, tuple[str, dict[str, Any]]] = {
    "compression": ("fedadmm", {"compression": TopK(share=0.4)}),
    "buffered": ("fedprox", {"clock": Clock(spread=1.0), "pace": Buffered(size=2, concurrency=3)}),
    "deadline": ("fedavg", {"clock": Clock(step=0.1, spread=2.0), "pace": Deadline(seconds=1.0)}),
    "server step": ("fedprox", {"server_step": AdamStep(lr=0.1)}),
    "clipping": ("feddyn", {"clipping_norm": 5.0}),
}


@pytest.mark.parametrize("part", PARTS)
def test_parts_and_paces_act_around_a_loop_as_around_ours(part: str) -> None:
    name, options = PARTS[part]
    problems, ends = quadratics(4), []
    for app, how in ((make_client_app(problems), local()), (own_app(problems), {})):
        strategy = ROW[name].strategy(local=how, node_wait=0.01, **options)
        ends.append(train(strategy, InProcessGrid(app, 4), 4))
    if part == "deadline":  # the server cannot plan a loop's steps
        assert np.isfinite(ends[1]).all()
    else:
        np.testing.assert_allclose(ends[1], ends[0], rtol=1e-9)


def noisy(module: nn.Module, config: Any, q: Quadratic) -> None:
    """A loop whose batches are drawn from torch's and NumPy's generators."""
    x, y = torch.tensor(q.X), torch.tensor(q.y)
    optimizer = SGD(module.parameters(), 0.05, momentum=0.9)
    for _ in range(3):
        rows = torch.randperm(q.n)[: 3 + np.random.randint(2)]  # noqa: NPY002
        optimizer.zero_grad()
        ((module(x[rows]) - y[rows]) ** 2).mean().backward()
        optimizer.step()


def run_noisy(store: Any, *, rounds: int = 4, grid_of: Any = InProcessGrid, **options: Any) -> Any:
    hosts = options.pop("on_hosts", None)
    app = own_app(quadratics(4), noisy, store=store, hosts=hosts)
    strategy = FedADMM(fraction_evaluate=0.0, fraction_train=0.75, seed=3, node_wait=0.01)
    shared = {"hosts": 2} if hosts else {}
    return train(strategy, grid_of(app, 4, **shared, **options), rounds)


def test_spread_over_hosts_the_model_is_the_same_to_the_bit() -> None:
    def hosts(context: Any) -> list[int]:
        place = int(context.node_config["partition-id"])
        return [place, place + 2]

    alone = run_noisy(ContextStore)
    np.testing.assert_array_equal(run_noisy(ContextStore, on_hosts=hosts), alone)


@pytest.mark.slow
def test_on_workers_the_model_is_the_same_to_the_bit() -> None:
    alone = run_noisy(ContextStore)
    np.testing.assert_array_equal(run_noisy(ContextStore, workers=2), alone)


def test_a_resumed_run_gives_the_model_of_an_uninterrupted_one(tmp_path: Path) -> None:
    def run(folder: Path, *lengths: int) -> np.ndarray:
        for number, rounds in enumerate(lengths):
            app = own_app(
                quadratics(4),
                noisy,
                store=lambda context: DirectoryStore(folder / "states", client_id(context)),
            )
            strategy = FedADMM(
                fraction_evaluate=0.0,
                seed=3,
                checkpoints=Checkpoints(folder / "checkpoints"),
                node_wait=0.01,
            )
            end = strategy.start(
                InProcessGrid(app, 4), grid_start(), rounds, resume=number > 0
            ).arrays
        return np.concatenate([array.numpy().ravel() for array in end.values()])

    np.testing.assert_array_equal(run(tmp_path / "a", 2, 4), run(tmp_path / "b", 4))


def test_a_client_whose_replies_are_lost_is_as_if_it_had_not_been_asked() -> None:
    """The loop's own optimizer aside, all that it leaves is undone."""
    federation = grid(quadratics(1))
    assert isinstance(federation, InProcessGrid)
    lost = {1}

    def fault(request: Message, reply: Message) -> Message | None:
        config = request.content.config_records.get("config", {})
        return None if config.get("server-round") in lost else reply

    ends = []
    for broken in (True, False):
        on = InProcessGrid(own_app(quadratics(1)), 1, fault=fault if broken else None)
        strategy = FedPD(fraction_evaluate=0.0, node_wait=0.01)
        ends.append(train(strategy, on, 3 if broken else 2))
    np.testing.assert_array_equal(*ends)


# ---- what a loop may do -------------------------------------------------------------------------


class Forces(nn.Module):
    """Differentiates by its inputs, which it marks itself."""

    def __init__(self) -> None:
        super().__init__()
        self.energy = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x.requires_grad_()
        (slope,) = torch.autograd.grad(self.energy(x).sum(), x, create_graph=self.training)
        return slope


class Tabular(nn.Module):
    """Takes one dict, whose numbers are of other types."""

    def __init__(self) -> None:
        super().__init__()
        self.kinds, self.line = nn.Embedding(7, 3), nn.Linear(7, 2)

    def forward(self, batch: Any) -> Any:
        """Return a record with a loss of its own, which needs the labels."""
        features = torch.cat([batch["numbers"].float(), self.kinds(batch["kind"])], 1)
        logits = self.line(features)
        return {"logits": logits, "loss": nn.functional.cross_entropy(logits, batch["labels"])}


DRAWN = torch.Generator().manual_seed(6)
POINTS, KINDS = torch.randn(12, 4, generator=DRAWN), torch.randint(7, (12,), generator=DRAWN)
CLASSES = torch.arange(12) % 2


def clips_norms(module: nn.Module) -> None:
    optimizer = SGD(module.parameters(), 0.5)

    def clip(*_: Any) -> None:
        nn.utils.clip_grad_norm_(module.parameters(), 0.1)

    optimizer.register_step_pre_hook(clip)
    for _ in range(4):
        optimizer.zero_grad()
        (module(POINTS[:, :3].clone()) + POINTS[:, :3]).square().sum().backward()
        optimizer.step()


def reads_a_record(module: nn.Module) -> None:
    """With groups by name, and a schedule of steps."""
    named = dict(module.named_parameters())
    biases = [p for name, p in named.items() if name.endswith("bias")]
    rest = [p for name, p in named.items() if not name.endswith("bias")]
    groups = [{"params": rest, "weight_decay": 0.1}, {"params": biases, "lr": 0.2}]
    optimizer = torch.optim.AdamW(groups, 0.05)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 4)
    for rows in torch.arange(12).split(5):
        batch = {"numbers": POINTS[rows].double(), "kind": KINDS[rows], "labels": CLASSES[rows]}
        optimizer.zero_grad()
        module(batch)["loss"].backward()
        optimizer.step()
        schedule.step()


def finds_boxes(module: nn.Module) -> None:
    """Batches without a target, and a row of targets for each box."""
    optimizer = Adam(module.parameters(), 0.01)
    images = torch.randn(6, 3, 8, 8, generator=torch.Generator().manual_seed(5))
    for rows, boxes in zip(
        images.split(2), ([], [(0, 1, 2), (1, 3, 3), (1, 0, 0)], []), strict=True
    ):
        maps = module(rows)
        wanted = torch.zeros_like(maps[:, 0])
        for image, row, column in boxes:
            wanted[image, row, column] = 1.0
        optimizer.zero_grad()
        nn.functional.binary_cross_entropy_with_logits(maps[:, 0], wanted).backward()
        optimizer.step()


def in_lower_precision(module: nn.Module) -> None:
    """Two outputs under autocast, with a GradScaler."""
    optimizer = torch.optim.RMSprop(module.parameters(), 0.01)
    scaler = torch.amp.GradScaler("cpu")
    for _ in range(3):
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            maps = module(torch.ones(2, 3, 8, 8))
            loss = maps.mean() + 0.4 * maps.square().mean()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()


LOOPS = {
    "clipping by a hook, inputs that are differentiated by": (Forces, clips_norms),
    "records, dicts, groups by name, a schedule": (Tabular, reads_a_record),
    "boxes": (functools.partial(nn.Conv2d, 3, 1, 3, 2, 1), finds_boxes),
    "autocast": (functools.partial(nn.Conv2d, 3, 1, 3, 2, 1), in_lower_precision),
}


@pytest.mark.parametrize("name", LOOPS)
def test_what_stands_in_a_loop_is_what_pytorch_does_to_the_bit(name: str) -> None:
    make, loop = LOOPS[name]
    torch.manual_seed(0)
    module = make()
    plain = copy.deepcopy(module)
    initial = ArrayRecord(module.state_dict())

    def client_fn(context: Any) -> AnyAlgorithmClient:
        problem = OwnTraining(module, lambda own, config: loop(own), 12)
        return AnyAlgorithmClient(problem, client_id=client_id(context))

    on = InProcessGrid(client_app(client_fn), 1)
    end = FedAvg(fraction_evaluate=0.0).start(on, initial, 1).arrays
    loop(plain)
    for name, tensor in plain.state_dict().items():
        np.testing.assert_array_equal(end[name].numpy(), tensor.numpy())
    moved = [not np.array_equal(end[n].numpy(), initial[n].numpy()) for n in initial]
    assert any(moved)


def test_fednova_refuses_a_loop_whose_optimizers_add_up_to_other_sums(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def loop(module: nn.Module, config: Any, q: Quadratic) -> None:
        head, tail = module.parameters()
        optimizers = SGD([head], 0.1), SGD([tail], 0.1, momentum=0.9)
        for _ in range(2):
            module(torch.tensor(q.X)).sum().backward()
            for optimizer in optimizers:
                optimizer.step()

    train(FedNova(fraction_evaluate=0.0), InProcessGrid(own_app(quadratics(1), loop), 1), 1)
    assert "fednova needs one sum of weights for all parameters" in caplog.text
