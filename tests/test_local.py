"""How clients train: both sides check alike, nothing is ignored, and a request has a ceiling.

Mutants tried by hand, each caught here: a schedule checked at its first round alone; a cache that
takes 1.0 and True for 1; rates of one solver for all; a solver's options unchecked on the server;
the ridge left out of the residual, of SCAFFOLD's (3), of the stationarity, of the fine-tuning step,
or put in where the solver decouples it; each factor of the ceiling left out; the ceiling one lower.
"""

from __future__ import annotations

import inspect
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import ConfigRecord, Message
from flwr.serverapp.strategy import FedAvg as FlowerFedAvg
from laws import TABLE, Row, every_algorithm
from problems import DIM, Quadratic, grid, make_client_app, quadratics, to_record, to_vector

from clients import CLIENTS, SOLVERS, ContextStore, LocalTraining, solve
from clients.base import MAX_STEPS
from clients.node.in_process import InProcessGrid
from fl_strategies import STRATEGIES, FedAvg, FedBC, FedPD, FedProx, PerFedBC, fedpd
from fl_strategies.core.local import TAKES, TORCH, torch_solver
from fl_strategies.core.randomness import stream
from fl_strategies.core.subproblem import Subproblem
from fl_strategies.server.options import Options
from simulations.config import RunConfig
from simulations.stationarity import stationarity

ROOT = Path(__file__).parent.parent
START = np.array([2.0, -1.0, 0.5, 3.0, -4.0])
CONFIG = {"seed": 0, "server-round": 1, "acked-round": -1}

# ---- both sides refuse alike --------------------------------------------------------------------

BAD: list[dict[str, Any]] = [
    {"lr": 0.0},
    {"lr": True},
    {"lr": "0.1"},
    {"lr": float("nan")},
    {"epochs": 0},
    {"epochs": 1.5},
    {"epochs": True},
    {"steps": -1},
    {"steps": 1.0},
    {"batch-size": -3},
    {"batch-size": 8.0},
    {"momentum": -0.1},
    {"weight-decay": -1.0},
    {"extrapolation": -0.5},
    {"box": -2.0},
    {"residual": -0.5},
    {"fine-tune": "test"},
    {"fine-tune-lr": -0.1},
    {"random-epochs": "false"},
    {"random-steps": 1, "steps": 4},
    {"random-steps": True},
    {"random-steps": True, "steps": 0, "epochs": 5},
    {"nesterov": True},
    {"solver": "newton"},
    {"solver": 3},
    {"solver": "lr_scheduler"},
    {"solver": "Optimizer"},
    {"solver": "adam", "momentum": 0.9},
    {"solver": "lbfgs", "weight-decay": 0.1},
    {"solver": "Rprop", "weight-decay": 0.1},
    {"solver": "delta-sgd", "momentum": 0.9},
    {"solver": "delta-sgd", "solver-params": "gama=2"},
    {"solver": "delta-sgd", "solver-params": "delta=-1"},
    {"solver": "delta-sgd", "solver-params": "same-batch=3"},
    {"solver": "sps", "solver-params": "batch-share=0.5"},
    {"solver": "sps", "solver-params": "growth=0.5"},
    {"solver": "sgd", "solver-params": "lr=1"},
    {"solver": "adam", "solver-params": "eps=-1"},
    {"solver": "adam", "solver-params": "betas=3"},
    {"solver": "RMSprop", "solver-params": "alpha"},
    {"solver-params": 2.0},
]


def refused(make: Any) -> str:
    with pytest.raises(ValueError) as caught:  # noqa: PT011
        make()
    return str(caught.value)


@pytest.mark.parametrize("settings", BAD, ids=str)
def test_a_strategy_refuses_what_its_clients_would_in_the_same_words(
    settings: dict[str, Any],
) -> None:
    words = refused(lambda: LocalTraining().updated(settings))
    assert refused(lambda: FedAvg(local=settings)) == words
    fields = {name.replace("-", "_"): value for name, value in settings.items()}
    assert refused(lambda: LocalTraining(**fields)) == words


@pytest.mark.parametrize("settings", BAD, ids=str)
@pytest.mark.parametrize("strategy", STRATEGIES.values(), ids=list(STRATEGIES))
def test_every_strategy_checks_its_local_settings(strategy: Any, settings: dict[str, Any]) -> None:
    refused(lambda: strategy(local=settings))


GOOD: list[dict[str, Any]] = [
    {"solver": name} | {n.replace("_", "-"): 0.5 for n in takes if n != "nesterov"}
    for name, takes in TAKES.items()
] + [
    {"solver": "RMSprop", "momentum": 0.3, "solver-params": "alpha=0.9"},
    {"solver": "AdamW", "weight-decay": 0.1},
    {"solver": "delta-sgd", "solver-params": "gamma=1 amplify-first=true"},
    {"solver": "sps", "solver-params": "c=1 growth=0"},
    {"solver": "sgd", "solver-params": "dampening=0.5"},
    {"solver": "lbfgs", "solver-params": "max-iter=3"},
    {"momentum": 0.9, "nesterov": True, "steps": 3, "random-steps": True, "random-epochs": True},
    {"lr": {0: 0.1, 4: 0.01}, "epochs": {0: 5, 9: 1}, "batch-size": 0},
    {"solver-params": "eps=1e-3"},  # of the client's own solver
]


@pytest.mark.parametrize("settings", GOOD, ids=str)
def test_what_clients_take_a_strategy_takes(settings: dict[str, Any]) -> None:
    strategy = FedAvg(local=settings)
    own = LocalTraining(solver="adam") if "solver" not in settings else LocalTraining()
    if "momentum" not in settings:
        own.updated(strategy.request(7, 0))


def test_settings_of_every_round_of_a_schedule_are_checked() -> None:
    assert "epochs must be int, got 2.5" in refused(
        lambda: FedAvg(local={"epochs": {0: 1, 8: 2.5}})
    )
    together = {"steps": {0: 4, 6: 0}, "random-steps": True}
    assert "random_steps needs steps" in refused(lambda: FedAvg(local=together))
    assert "rounds are integers" in refused(lambda: FedAvg(local={"lr": {0: 0.1, 0.5: 0.2}}))


def test_a_function_cannot_be_sent_as_a_solver() -> None:
    assert "solver must be a name" in refused(lambda: FedAvg(local={"solver": torch.optim.SGD}))
    assert LocalTraining(solver=torch.optim.SGD, momentum=0.5).rate == 0.1


@pytest.mark.parametrize("value", [1.0, True, "1", [1]])
def test_a_setting_of_another_type_is_refused_after_an_equal_one_was_taken(value: Any) -> None:
    assert LocalTraining().updated({"epochs": 1, "steps": 1}).steps == 1
    for name in ("epochs", "steps"):
        assert name in refused(lambda name=name: LocalTraining().updated({name: value}))


def test_the_settings_that_torchs_solvers_take_are_those_of_its_classes() -> None:
    assert [*SOLVERS] == [*TORCH, "delta-sgd", "sps"]
    for name in TORCH:
        arguments = inspect.signature(torch_solver(name)).parameters
        assert {n for n in ("momentum", "nesterov", "weight_decay") if n in arguments} == {
            *TAKES[name]
        }


@pytest.mark.slow
def test_built_in_solvers_are_checked_without_torch() -> None:
    code = (
        "import sys; from fl_strategies import FedAvg\n"
        "for name in ('gd', 'sgd', 'adam', 'adagrad', 'lbfgs', 'delta-sgd', 'sps'):\n"
        "    FedAvg(local={'solver': name, 'epochs': 2})\n"
        "FedAvg(local={'solver': 'delta-sgd', 'solver-params': 'gamma=1'})\n"
        "assert 'torch' not in sys.modules\n"
        "FedAvg(local={'solver': 'RMSprop'})\n"
        "assert 'torch' in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)


# ---- names of arguments -------------------------------------------------------------------------


@pytest.mark.parametrize("algorithm", STRATEGIES)
def test_an_argument_that_a_strategy_lacks_is_named_with_those_it_has(algorithm: str) -> None:
    strategy: Any = STRATEGIES[algorithm]
    own, common = strategy.hyperparameters(), Options.declarations
    for name in [*own, *common]:
        typo = name + "x"
        with pytest.raises(TypeError) as caught:
            strategy(**{typo: 1})
        words = str(caught.value)
        assert words.startswith(f"{strategy.__name__} has no argument {typo!r}")
        assert f"did you mean {name!r}?" in words
        assert all(repr(known) in words for known in (*own, *common))


def test_a_name_like_no_other_gets_no_suggestion() -> None:
    with pytest.raises(
        TypeError, match=r"FedBC has no argument 'roh', 'zzz'; its own are \['alpha'"
    ):
        FedBC(roh=1, zzz=2)  # type: ignore[call-arg]


def test_fedproxs_mu_has_flowers_name_as_well() -> None:
    assert FedProx(proximal_mu=0.3).request(1, 0)["proximal-mu"] == 0.3
    assert FedProx(proximal_mu={0: 0.3, 2: 0.1}).request(2, 0)["proximal-mu"] == 0.1
    assert FedProx(mu=0.3, proximal_mu=0.3).mu == FedProx(mu=0.3).mu == 0.3
    with pytest.raises(ValueError, match=r"mu and proximal_mu are one, got 0.2 and 0.3"):
        FedProx(mu=0.2, proximal_mu=0.3)
    with pytest.raises(ValueError, match="proximal_mu must be >= 0, got -1"):
        FedProx(proximal_mu=-1)


# ---- rates --------------------------------------------------------------------------------------

OWN_RATES = {"delta-sgd": 0.2, "sps": 1.0} | dict.fromkeys((*TORCH, "RMSprop"), 0.1)


@pytest.mark.parametrize("solver", OWN_RATES)
def test_a_solver_starts_at_its_own_rate_where_none_is_given(solver: str) -> None:
    """As a strategy's setting, a client's own, a setting of Flower's strategies, and a run's."""
    problems, rate = quadratics(2), OWN_RATES[solver]
    given = {"solver": solver, "epochs": 2}
    own = LocalTraining()
    options: dict[str, Any] = {"fraction_evaluate": 0.0}

    def ours(settings: dict[str, Any], training: LocalTraining = own) -> np.ndarray:
        strategy = FedAvg(local=settings, **options)
        result = strategy.start(grid(problems, training=training), to_record(START), 2)
        return to_vector(result.arrays)

    expected = ours(given | {"lr": rate})
    np.testing.assert_array_equal(ours(given), expected)
    np.testing.assert_array_equal(ours({}, LocalTraining(solver=solver, epochs=2)), expected)
    assert not np.array_equal(ours(given | {"lr": 2 * rate}), expected) or solver in (
        "sps",
        "lbfgs",
    )
    theirs = FlowerFedAvg(**options).start(
        grid(problems, training=own), to_record(START), 2, train_config=ConfigRecord(given)
    )
    np.testing.assert_allclose(to_vector(theirs.arrays), expected, rtol=1e-9)
    if solver in ("delta-sgd", "sps"):
        for dataset in ("digits", "mnist", "fedpd-weak"):
            run = RunConfig(algorithm="fedavg", dataset=dataset, solver=solver).completed()
            assert (run.lr, run.momentum) == (rate, 0.0)


def test_a_rate_that_is_given_holds_for_every_solver() -> None:
    for solver in OWN_RATES:
        assert LocalTraining(solver=solver, lr=0.05).rate == 0.05
        assert LocalTraining(lr=0.05).updated({"solver": solver}).rate == 0.05


# ---- ignored settings are refused ---------------------------------------------------------------

TWO = {"gamma": 2.0, "inner-steps": 3, "inner-batch": 2, "full-every": 5}
PD = {"eta": 1.0, "x0-rule": "paper", "first-algorithm-round": 0, "algorithm-rounds": 1}


def fit(algorithm: str, config: dict[str, Any], **options: Any) -> Any:
    """One request to a client of the algorithm, past any strategy."""
    (q,) = quadratics(1)
    store = ContextStore(next(iter(grid([q]).contexts.values())))
    options = {"training": LocalTraining(solver="gd"), **options}
    client = CLIENTS[algorithm](q.problem(), client_id=0, store=store, **options)
    start = [START[:4].reshape(2, 2), START[4:]]
    return client.fit(start, {**CONFIG, **config})


@pytest.mark.parametrize("name", TWO)
def test_oracle_one_refuses_the_hyperparameters_of_oracle_two(name: str) -> None:
    words = refused(lambda: FedPD(**{name.replace("-", "_"): TWO[name]}))  # type: ignore[arg-type]
    assert words == f"oracle I has no use for {name} = {TWO[name]!r}: its steps are set by local"
    assert refused(lambda: fit("fedpd", PD | {"oracle": "I", name: TWO[name]})) == words
    default = fedpd.ORACLE_TWO[name]
    refused(lambda: FedPD(**{name.replace("-", "_"): default}))  # type: ignore[arg-type]
    fit("fedpd", PD | {"oracle": "I"})


@pytest.mark.parametrize("name", LocalTraining().settings)
def test_oracle_two_refuses_all_of_local_but_fine_tuning(name: str) -> None:
    given = {"steps": 4, "lr": 0.3, "residual": 0.0, "fine-tune": "train", "fine-tune-lr": 0.1}
    value = given.get(name)
    setting = {name: LocalTraining().settings[name] if value is None else value}
    request = PD | {"oracle": "II"} | TWO
    if name == "fine-tune":
        assert FedPD(oracle="II", local=setting).request(1, 0)[name] == "train"
        fit("fedpd", request | setting)
        return
    words = refused(lambda: FedPD(oracle="II", local=setting))
    assert words.startswith(f"oracle II has no use for {name} = {setting[name]!r}: its steps are")
    assert refused(lambda: fit("fedpd", request | setting)) == words
    tuned = setting | {"fine-tune": "train"}
    if name in ("fine-tune-lr", "lr", "batch-size"):  # which are those of the step that measures
        FedPD(oracle="II", local=tuned)
        fit("fedpd", request | tuned)
    else:
        refused(lambda: FedPD(oracle="II", local=tuned))
        refused(lambda: fit("fedpd", request | tuned))


def test_oracle_two_refuses_a_clients_own_weight_decay() -> None:
    """It would be missing in the gradients that g is made of."""
    decaying = LocalTraining(weight_decay=0.1)
    words = refused(lambda: fit("fedpd", PD | {"oracle": "II"} | TWO, training=decaying))
    assert "weight_decay must be 0, got 0.1" in words


def test_a_run_with_oracle_two_sends_no_defaults_and_refuses_what_is_set() -> None:
    run = {"algorithm": "fedpd", "dataset": "fedpd-weak", "params": "oracle=II"}
    config = RunConfig.parse(run)
    assert config.strategy().local == {"fine-tune": "off"}
    assert RunConfig.parse(config.to_run_config()) == config  # as clients parse it once more
    for given in ({"solver": "adam"}, {"lr": 0.2}, {"weight-decay": 0.1}, {"lr-decay": True}):
        words = refused(lambda given=given: RunConfig.parse(run | given))
        assert "has no use for" in words
        assert next(iter(given)).replace("-", "_") in words


@pytest.mark.parametrize("make", [FedBC, PerFedBC])
def test_a_fixed_gamma_takes_no_steps(make: Any) -> None:
    words = refused(lambda: make(gamma=2.0, alpha_gamma=0.1))
    assert words == 'alpha_gamma needs gamma="heuristic", got 0.1: gamma is fixed at 2.0'
    asked = make(gamma=2.0, local={"solver": "gd"}).request(1, 0)
    assert "alpha-gamma" not in asked
    fit(make.algorithm, asked)
    assert refused(lambda: fit(make.algorithm, asked | {"alpha-gamma": 0.1})) == words
    assert make(alpha=0.3).request(1, 0)["alpha-gamma"] == 0.3
    assert make(alpha=0.3, alpha_gamma=0.1).request(1, 0)["alpha-gamma"] == 0.1


def test_a_clients_own_draws_do_not_disturb_algorithms_that_count_their_steps() -> None:
    """FedSGD and pFedMe's inner solver set the steps: nothing is drawn there."""
    drawing = LocalTraining(lr=0.01, steps=4, random_steps=True, random_epochs=True)
    plain = LocalTraining(solver="gd", lr=0.01)
    for algorithm in ("fedsgd", "pfedme"):
        settings = {"lr": 0.01} if algorithm == "fedsgd" else {"lr": 0.01, "solver": "gd"}
        asked = STRATEGIES[algorithm](local=settings).request(1, 0)
        if algorithm == "pfedme":
            asked |= {"steps": 3, "random-steps": False}
        found, expected = (fit(algorithm, asked, training=own) for own in (drawing, plain))
        np.testing.assert_array_equal(to_vector(found[0]), to_vector(expected[0]))
        assert found[2]["steps"] == expected[2]["steps"]


# ---- weight decay is a term of f_i --------------------------------------------------------------

RIDGE = 0.3


def ridged(q: Quadratic, w: np.ndarray) -> np.ndarray:
    return q.gradient(w) + RIDGE * w


@pytest.mark.parametrize("solver", ["gd", "sgd", "adam", "RMSprop"])
def test_the_residual_is_that_of_f_with_its_weight_decay(solver: str) -> None:
    q, slope, pull, centre = quadratics(4)[3], START / 3, 0.9, START[::-1].copy()
    training = LocalTraining(
        solver=solver, lr=0.01, epochs=3, batch_size=4, weight_decay=RIDGE, residual=0.0
    )
    bent = Subproblem(torch.tensor(slope), pull, torch.tensor(centre))
    info = solve(q.problem(), torch.tensor(START), bent, training, stream(1, "local"))
    found = info.w
    w = found.numpy()
    gradient = ridged(q, w) + slope + pull * (w - centre)
    assert info.residual == pytest.approx(gradient @ gradient, rel=1e-9)


def test_the_minimiser_of_f_and_its_weight_decay_has_no_residual_and_ends_the_training() -> None:
    (q,) = quadratics(1)
    rest = np.linalg.solve(q.A + RIDGE * np.eye(DIM), q.A @ q.b)
    training = LocalTraining(solver="gd", epochs=9, weight_decay=RIDGE, residual=1e-20)
    info = solve(q.problem(), torch.tensor(rest), Subproblem(), training, stream(1, "local"))
    _ = info.w
    assert info.epochs == 1
    assert info.residual < 1e-20


@pytest.mark.parametrize(
    "settings",
    [{"solver": "AdamW"}, {"solver": "adam", "solver_params": "decoupled_weight_decay=true"}],
    ids=str,
)
def test_a_decay_that_the_solver_decouples_is_no_term_of_f(settings: dict[str, Any]) -> None:
    (q,) = quadratics(1)
    training = LocalTraining(**settings, lr=0.01, weight_decay=RIDGE, residual=0.0)
    info = solve(q.problem(), torch.tensor(START), Subproblem(), training, stream(1, "local"))
    w = info.w
    gradient = q.gradient(w.numpy())
    assert info.residual == pytest.approx(gradient @ gradient, rel=1e-9)


def test_the_stationarity_of_a_run_is_that_of_f_with_its_weight_decay() -> None:
    problems = quadratics(3)
    gradient = np.mean([ridged(q, START) for q in problems], axis=0)
    found = stationarity([q.problem() for q in problems], torch.tensor(START), ridge=RIDGE)
    assert found.gradient == pytest.approx(gradient @ gradient, rel=1e-12)


def test_scaffolds_gradient_of_f_has_its_weight_decay() -> None:
    """After (3) of option I, c_i+ - c_i is grad f_i at the model received, c_i being 0."""
    (q,) = quadratics(1)
    store = ContextStore(next(iter(grid([q]).contexts.values())))
    own = LocalTraining(solver="gd", weight_decay=RIDGE)
    client = CLIENTS["scaffold"](q.problem(), client_id=0, store=store, training=own)
    start = [START[:4].reshape(2, 2), START[4:], np.zeros((2, 2)), np.zeros(1)]
    arrays, _, _ = client.fit(start, {**CONFIG, "option": "I"})
    np.testing.assert_allclose(to_vector(arrays[2:]), ridged(q, START), rtol=1e-12)


def test_the_fine_tuning_step_goes_along_the_gradient_of_f_with_its_weight_decay() -> None:
    (q,) = quadratics(1)
    own = LocalTraining(solver="gd", lr=0.2, weight_decay=RIDGE, fine_tune="train")
    problem = q.problem()
    client = CLIENTS["fedavg"](problem, client_id=0, test=problem, training=own)
    _, _, metrics = client.evaluate([START[:4].reshape(2, 2), START[4:]], CONFIG)
    expected = q.value(START - 0.2 * ridged(q, START))
    assert metrics["tuned-loss"] == pytest.approx(expected, rel=1e-12)


# ---- the ceiling --------------------------------------------------------------------------------


def asked_of(row: Row, **options: Any) -> tuple[dict[str, Any], list[Message]]:
    """The metrics of a first round with these strategy and client options, and its messages."""
    clients = {name: options.pop(name) for name in ("max_steps",) if name in options}
    seen: list[Message] = []

    def note(_: Message, reply: Message) -> Message:
        if reply.metadata.message_type == "train":
            seen.append(reply)
        return reply

    def limited(*args: Any, **given: Any) -> Any:
        return CLIENTS[row.name](*args, **given, **clients)

    (q, *_) = quadratics(1)
    app = make_client_app([q], client=limited, store=ContextStore)
    strategy = row.strategy(**options)
    strategy.start(InProcessGrid(app, 1, fault=note), to_record(START), 1)
    return dict(strategy.result.train_metrics_clientapp.get(1, {})), seen


SETTINGS = {"solver": "sgd", "lr": 0.01, "epochs": 3, "batch-size": 2}


@every_algorithm
def test_a_client_takes_requests_up_to_its_ceiling_and_refuses_the_next(row: Row) -> None:
    """Whatever multiplies the steps is in the estimate: it bounds what is then reported."""
    metrics, (reply,) = asked_of(row, local=SETTINGS)
    assert not reply.has_error()
    _, (reply,) = asked_of(row, local=SETTINGS, max_steps=1)
    if row.name == "fedsgd":
        assert not reply.has_error()
        return
    reason = reply.error.reason
    found = re.search(r"asks for up to ([\d,]+) local steps, and client 0 takes at most 1 ", reason)
    assert found, reason
    most = int(found[1].replace(",", ""))
    assert metrics["steps"] <= most
    _, (reply,) = asked_of(row, local=SETTINGS, max_steps=most)
    assert not reply.has_error()
    _, (reply,) = asked_of(row, local=SETTINGS, max_steps=most - 1)
    assert f"takes at most {most - 1:,} (its max_steps)" in reply.error.reason


ABSURD: list[tuple[str, dict[str, Any]]] = [
    ("fedavg", {"steps": 10**12}),
    ("fedavg", {"epochs": 10**12}),
    ("fedavg", {"epochs": 10**12, "random-epochs": True}),
    ("fedavg", {"solver": "lbfgs", "solver-params": "max_iter=1000000000000"}),
    ("fedavg", {"solver": "lbfgs", "solver-params": "max_iter=1e999"}),
    ("per-fedavg", {"steps": 10**12}),
    ("per-fedbc", {"inner-steps": 10**12}),
    ("pfedme", {"inner-steps": 10**12}),
    ("pfedme", {"inner-steps": 2 * 10**3, "epochs": 2 * 10**3}),
    ("fedbcd-i", {"offline-rounds": 10**12}),
    ("fedpd", {"algorithm-rounds": 10**12}),
    ("fedpd", {"algorithm-rounds": 2 * 10**3, "epochs": 2 * 10**3}),
    ("fedpd", TWO | {"oracle": "II", "inner-steps": 10**12}),
    ("fedpd", TWO | {"oracle": "II", "inner-batch": 10**12}),
]


@pytest.mark.parametrize(("algorithm", "changes"), ABSURD, ids=str)
def test_an_absurd_request_is_refused_before_any_work(
    algorithm: str, changes: dict[str, Any]
) -> None:
    row = next(row for row in TABLE if row.name == algorithm)
    strategy = row.strategy(local={"solver": "gd"} if algorithm == "pfedme" else {})
    asked = strategy.request(1, 0) | changes
    words = refused(lambda: fit(algorithm, asked))
    assert f"client 0 takes at most {MAX_STEPS:,} (its max_steps)" in words
    assert "the request asks for up to" in words


@pytest.mark.parametrize("name", ["algorithm-rounds", "inner-steps", "full-every"])
@pytest.mark.parametrize("value", [0, -3, 1.5, True, "4", 10**40])
def test_a_count_in_a_request_is_a_whole_number_above_zero(name: str, value: Any) -> None:
    words = refused(lambda: fit("fedpd", PD | {"oracle": "II"} | TWO | {name: value}))
    assert words.startswith(f"{name} must be an integer >= 1 and <= ")


@pytest.mark.parametrize("value", [0, -1, 2.5, True])
def test_a_ceiling_is_a_whole_number_above_zero(value: Any) -> None:
    assert "max_steps must be an integer >= 1" in refused(
        lambda: fit("fedavg", {}, max_steps=value)
    )


def test_a_runs_ceiling_reaches_its_clients(tmp_path: Path) -> None:
    from simulations.worker import client_fn, fresh_model

    run = {"algorithm": "fedavg", "clients": 4, "max-steps": 77, "output": str(tmp_path)}
    config = RunConfig.parse(run).to_run_config()
    context = next(iter(InProcessGrid(make_client_app([]), 1, run_config=config).contexts.values()))
    client = client_fn(context)
    model = [array.numpy() for array in fresh_model(RunConfig.parse(run)).state_dict().values()]
    assert "client 0 takes at most 77 (its max_steps)" in refused(
        lambda: client.fit(model, {"algorithm": "fedavg", "steps": 78})
    )
