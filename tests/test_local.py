"""How clients train: both sides check alike, and nothing is ignored."""

from __future__ import annotations

import functools
import inspect
import re
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import ConfigRecord
from flwr.serverapp.strategy import FedAvg as FlowerFedAvg
from local_work import PD, START, TWO, fit, refused
from problems import grid, quadratics, to_record, to_vector
from trials import ROOT

from clients import SOLVERS, LocalTraining
from fl_strategies import STRATEGIES, FedAvg, FedBC, FedPDVR, FedProx, PerFedBC
from fl_strategies.server.options import Options
from fl_strategies.solvers.local import PACKAGED, TAKES, TORCH, default_training, named_solver
from simulations.config import RunConfig

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
    {"solver": "RMSprop", "solver-params": "alpha"},
    {"solver-params": 2.0},
]


@pytest.mark.parametrize("settings", BAD, ids=str)
def test_a_strategy_refuses_what_its_clients_would_in_the_same_words(
    settings: dict[str, Any],
) -> None:
    words = refused(lambda: LocalTraining().updated(settings))
    assert refused(lambda: FedAvg(local=settings)) == words
    fields = {name.replace("-", "_"): value for name, value in settings.items()}
    assert refused(lambda: LocalTraining(**fields)) == words


def test_every_strategy_checks_its_local_settings() -> None:
    for strategy in STRATEGIES.values():
        for settings in ({"lr": 0.0}, {"solver": "newton"}):
            refused(lambda strategy=strategy, settings=settings: strategy(local=settings))


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
    {"momentum": 0.9, "nesterov": True, "steps": 3, "random-steps": True},
    {"lr": {1: 0.1, 4: 0.01}, "epochs": {1: 5, 9: 1}, "batch-size": 0},
    {"solver-params": "eps=1e-3"},  # of the client's own solver
]


@pytest.mark.parametrize("settings", GOOD, ids=str)
def test_what_clients_take_a_strategy_takes(settings: dict[str, Any]) -> None:
    strategy = FedAvg(local=settings)
    own = LocalTraining(solver="adam") if "solver" not in settings else LocalTraining()
    if "momentum" not in settings:
        own.updated(strategy.request(7, 0))


def test_settings_of_every_round_of_a_schedule_are_checked() -> None:
    assert "epochs must be an integer, got 2.5" in refused(
        lambda: FedAvg(local={"epochs": {1: 1, 8: 2.5}})
    )
    together = {"steps": {1: 4, 6: 0}, "random-steps": True}
    assert "random_steps needs steps" in refused(lambda: FedAvg(local=together))
    assert "rounds are integers" in refused(lambda: FedAvg(local={"lr": {1: 0.1, 0.5: 0.2}}))


def test_a_function_cannot_be_sent_as_a_solver() -> None:
    assert "solver must be a name" in refused(lambda: FedAvg(local={"solver": torch.optim.SGD}))
    assert LocalTraining(solver=torch.optim.SGD, momentum=0.5).rate == 0.1


@pytest.mark.parametrize("value", [1.0, True, "1", [1]])
def test_a_setting_of_another_type_is_refused_after_an_equal_one_was_taken(value: Any) -> None:
    assert LocalTraining().updated({"epochs": 1, "steps": 1}).steps == 1
    for name in ("epochs", "steps"):
        assert name in refused(lambda name=name: LocalTraining().updated({name: value}))


def test_the_settings_that_torchs_solvers_take_are_those_of_its_classes() -> None:
    assert [*SOLVERS] == [*TORCH, "delta-sgd", "sps", *PACKAGED]
    for name in TORCH:
        arguments = inspect.signature(named_solver(name)).parameters
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


def test_an_argument_that_a_strategy_lacks_is_named_with_those_it_has() -> None:
    for strategy in STRATEGIES.values():
        own, common = strategy.hyperparameters(), Options.declarations
        for name in [*own, *common] if strategy is FedAvg else own:
            typo = name + "x"
            with pytest.raises(TypeError) as caught:
                strategy(**{typo: 1})
            words = str(caught.value)
            assert words.startswith(f"{strategy.__name__} has no argument {typo!r}")
            assert f"did you mean {name!r}?" in words or len(name) == 1
            assert words.endswith(f"; its own are {[*own]}")


def test_a_name_like_no_other_gets_no_suggestion() -> None:
    with pytest.raises(
        TypeError, match=r"FedBC has no argument 'roh', 'zzz'; its own are \['alpha'"
    ):
        FedBC(roh=1, zzz=2)  # type: ignore[call-arg]


def test_a_setting_of_clients_given_as_an_argument_is_shown_in_local() -> None:
    for setting in default_training().settings:
        if (name := setting.replace("-", "_")) not in FedAvg.declarations:
            hint = f"FedAvg has no argument {name!r}; local={{...}} takes [{name!r}]; its own are"
            with pytest.raises(TypeError, match=re.escape(hint)):
                FedAvg(**{name: 0.1})


WORDS = {"Epochs": "epochs", "epoch": "epochs", "batch_size": "batch-size", "momentun": "momentum"}


@pytest.mark.parametrize("word", WORDS)
def test_a_misspelt_setting_is_recognised_wherever_it_is_given(
    word: str, caplog: pytest.LogCaptureFixture
) -> None:
    hint = f"{word!r} (did you mean {WORDS[word]!r}?)"
    with pytest.raises(ValueError, match=re.escape(hint)):
        FedAvg(local={word: 1})
    start = functools.partial(FedAvg(fraction_evaluate=0.0).start, grid(quadratics(1)))
    start(to_record(START), 1, train_config=ConfigRecord({word: 5}))
    assert f"train_config has {hint}" in caplog.text


@pytest.mark.parametrize(
    ("local", "hint", "remedy"),
    [
        ({"learning-rate": 0.1}, "unknown local settings 'learning-rate'; known", {"lr": 0.1}),
        ({"epoch": 2}, "'epochs'?", {"epochs": 2}),
        ({"solver": "adamw"}, "'AdamW'?", {"solver": "AdamW"}),
        ({"solver": "Delta_SGD"}, "'delta-sgd'?", {"solver": "delta-sgd"}),
        ({"solver": "sgdm"}, "'sgd'?", {"solver": "sgd", "momentum": 0.9}),
        ({"solver": "Optimizer"}, "unknown solver 'Optimizer'; known", {}),
        ({"solver": "muon"}, "'Muon'?", {}),
        ({"scheduler": 1}, "'lr-schedule'?", {"lr-schedule": "cosine"}),
        ({"amp": True}, "unknown local settings 'amp'; known", {}),
    ],
)
def test_a_hints_remedy_trains_and_other_words_get_no_hint(
    local: dict[str, Any], hint: str, remedy: dict[str, Any]
) -> None:
    with pytest.raises(ValueError, match=re.escape(hint)):
        FedAvg(local=local)
    strategy = FedAvg(local=remedy, fraction_evaluate=0.0)
    assert strategy.start(grid(quadratics(1)), to_record(START), 1).skipped == []


@pytest.mark.parametrize(
    ("name", "hint"), [("FedADMM", r" \(did you mean 'fedadmm'\?\)"), ("fedsvrg", "")]
)
def test_an_unknown_algorithm_is_refused_with_the_known_ones(name: str, hint: str) -> None:
    with pytest.raises(ValueError, match=f"unknown algorithm '{name}'{hint}; known: "):
        RunConfig.parse({"algorithm": name}).completed()


def test_options_of_an_optimizer_are_read_as_python_reads_them() -> None:
    for text in ("betas=(0.9, 0.95) eps=1e-6", "betas=[0.9,0.95] eps=1e-6"):
        given = LocalTraining(solver="adam", solver_params=text).handed_on
        assert tuple(given["betas"]) == (0.9, 0.95)
        assert given["eps"] == 1e-6


def test_an_argument_without_a_name_is_refused_by_its_value() -> None:
    for strategy in STRATEGIES.values():
        with pytest.raises(TypeError, match=f"^{strategy.__name__} takes only named .* got 0.3 "):
            strategy(0.3, 2)  # type: ignore[call-arg, misc]


def test_fedproxs_mu_has_flowers_name_as_well() -> None:
    assert FedProx(proximal_mu=0.3).request(1, 0)["proximal-mu"] == 0.3
    assert FedProx(proximal_mu={1: 0.3, 2: 0.1}).request(2, 0)["proximal-mu"] == 0.1
    assert FedProx(mu=0.3, proximal_mu=0.3).mu == FedProx(mu=0.3).mu == 0.3
    with pytest.raises(ValueError, match=r"mu and proximal_mu are one, got 0.2 and 0.3"):
        FedProx(mu=0.2, proximal_mu=0.3)
    with pytest.raises(ValueError, match="proximal_mu must be >= 0, got -1"):
        FedProx(proximal_mu=-1)


# ---- rates --------------------------------------------------------------------------------------

OWN_RATES = {
    "delta-sgd": 0.2,
    "sps": 1.0,
    "prodigy": 1.0,
    "dog": 1.0,
    "schedule-free": 1.0,
} | dict.fromkeys((*TORCH, "RMSprop"), 0.1)


@pytest.mark.parametrize("solver", OWN_RATES)
def test_a_solver_starts_at_its_own_rate_where_none_is_given(solver: str) -> None:
    """As a strategy's setting, a client's own, a setting of Flower's strategies, and a run's."""
    problems, rate = quadratics(2), OWN_RATES[solver]
    given = {"solver": solver, "epochs": 2}
    own = LocalTraining()
    options: dict[str, Any] = {"fraction_evaluate": 0.0}

    def ours(settings: dict[str, Any], training: LocalTraining = own) -> np.ndarray:
        strategy = FedAvg(local=settings, **options)
        result = strategy.start(grid(problems, training=training), to_record(START), 1)
        return to_vector(result.arrays)

    expected = ours(given | {"lr": rate})
    np.testing.assert_array_equal(ours(given), expected)
    np.testing.assert_array_equal(ours({}, LocalTraining(solver=solver, epochs=2)), expected)
    assert not np.array_equal(ours(given | {"lr": 2 * rate}), expected) or solver in (
        "sps",
        "lbfgs",
    )
    theirs = FlowerFedAvg(**options).start(
        grid(problems, training=own), to_record(START), 1, train_config=ConfigRecord(given)
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


@pytest.mark.parametrize(
    ("settings", "idle"),
    [
        ({"steps": 5, "epochs": 3}, "epochs"),
        ({"steps": 5, "random-epochs": True}, "random-epochs"),
        ({"solver": "gd", "batch-size": 8}, "batch-size"),
        ({"solver": "lbfgs", "batch-size": {1: 8, 4: 16}}, "batch-size"),
    ],
)
def test_a_setting_without_effect_beside_the_others_is_refused(
    settings: dict[str, Any], idle: str
) -> None:
    words = refused(lambda: FedAvg(local=settings))
    assert words.startswith(f"{idle} = {settings[idle]!r} has no effect: ")
    numbers = {name: value for name, value in settings.items() if not isinstance(value, dict)}
    run = {"algorithm": "fedavg", **numbers, "batch-size": 8}
    run = {name: str(value).lower() if value is True else value for name, value in run.items()}
    assert f"has no use for {{'{idle}'" in refused(lambda: RunConfig.parse(run))
    FedAvg(local={"steps": {1: 5, 3: 0}, "epochs": 3})  # epochs count from round 3 on
    kept = RunConfig.parse({"algorithm": "fedavg", "dataset": "mnist", "steps": 5})
    assert "epochs" not in kept.local()  # a default of the data set


@pytest.mark.parametrize("name", LocalTraining().settings)
def test_an_algorithm_without_a_solver_refuses_all_of_local_but_fine_tuning(name: str) -> None:
    given = {"steps": 4, "lr": 0.3, "residual": 0.0, "fine-tune": "train", "fine-tune-lr": 0.1}
    value = given.get(name)
    setting = {name: LocalTraining().settings[name] if value is None else value}
    request = PD | TWO
    if name == "fine-tune":
        assert FedPDVR(local=setting).request(1, 0)[name] == "train"
        fit("fedpd-vr", request | setting)
        return
    words = refused(lambda: FedPDVR(local=setting))
    assert words.startswith(f"fedpd-vr has no use for {name} = {setting[name]!r}: its hyper")
    assert refused(lambda: fit("fedpd-vr", request | setting)) == words
    tuned = setting | {"fine-tune": "train"}
    # which are those of the steps after which it measures
    if name in ("fine-tune-lr", "fine-tune-epochs", "lr", "batch-size"):
        FedPDVR(local=tuned)
        fit("fedpd-vr", request | tuned)
    else:
        refused(lambda: FedPDVR(local=tuned))
        refused(lambda: fit("fedpd-vr", request | tuned))


def test_fedpd_vr_refuses_a_clients_own_weight_decay() -> None:
    """It would be missing in the gradients that g is made of."""
    decaying = LocalTraining(weight_decay=0.1)
    words = refused(lambda: fit("fedpd-vr", PD | TWO, training=decaying))
    assert "weight_decay must be 0, got 0.1" in words


def test_a_run_without_a_solver_sends_no_defaults_and_refuses_what_is_set() -> None:
    run = {"algorithm": "fedpd-vr", "dataset": "fedpd-weak"}
    config = RunConfig.parse(run)
    assert config.strategy().local == {"fine-tune": "off"}
    assert RunConfig.parse(config.to_run_config()) == config  # as clients parse it once more
    for given in ({"solver": "adam"}, {"lr": 0.2}, {"weight-decay": 0.1}, {"lr-decay": "step"}):
        words = refused(lambda given=given: RunConfig.parse(run | given))
        assert "has no use for" in words
        assert next(iter(given)) in words


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
