"""The papers' printed rules and their authors' rules: each is accepted, runs, and is what it says.

A default may differ from them, as it is what works. So a study, whose table was measured once,
names every hyperparameter in which they differ, and means the same after a default has changed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict
from typing import Any

import numpy as np
import pytest
from bcd import CLOUD_RULES
from board_settings import by_name
from laws import START, train
from problems import DIM, Formula, grid, quadratics

from clients import DeltaSGD, LocalTraining
from fl_strategies import (
    STRATEGIES,
    FedADMM,
    FedBC,
    FedBCD,
    FedPD,
    fedadmm,
    fedbc,
    fedpd,
)
from fl_strategies.core.settings_text import format_params, parse_params
from fl_strategies.core.subproblem import Subproblem
from fl_strategies.proximity import Dual, State
from fl_strategies.solvers import delta_sgd

PAPERS = ("fedadmm", "fedpd", "fedpd-vr", "fedbc", "per-fedbc", *CLOUD_RULES)
every_form = pytest.mark.parametrize("form", ["paper", "authors"])
every_algorithm = pytest.mark.parametrize("name", PAPERS)

NEEDED: dict[str, dict[str, Any]] = {
    **{name: {"eta_z": 0.1, "box": 4.0} for name in CLOUD_RULES},
    "fedpd-vr": {"eta": 0.1, "gamma": 0.05},
}
"""A summed step for more than two devices, a box that holds the tests' initial model, and FedPDVR's
rates, which its paper does not say."""


@every_algorithm
@every_form
def test_a_strategy_takes_its_rules_and_clients_are_told_of_their_local_settings(
    name: str, form: str
) -> None:
    make = STRATEGIES[name]
    rule, settings = getattr(make, f"{form}_rule"), getattr(make, f"{form}_local")
    one = make(**rule, local=settings, fraction_evaluate=0.0)
    assert {key: getattr(one, key) for key in rule} == rule
    told = LocalTraining().updated(one.request(1, 0))
    assert {key: told.settings[key] for key in settings} == settings


@every_algorithm
@every_form
def test_the_rules_train(name: str, form: str) -> None:
    rule = getattr(STRATEGIES[name], f"{form}_rule") | NEEDED.get(name, {})
    problems = quadratics(3)
    found = train(STRATEGIES[name](**rule, fraction_evaluate=0.0), grid(problems), 3)
    near = np.linalg.norm([q.b for q in problems], axis=1).max() + np.linalg.norm(START)
    assert 0.0 < np.linalg.norm(found - START) < 2 * near


@pytest.mark.parametrize("make", [delta_sgd.Options, DeltaSGD])
def test_delta_sgd_takes_its_rules_as_options_and_as_text(make: Any) -> None:
    assert {**asdict(delta_sgd.Options()), **make.paper_rule} == asdict(delta_sgd.Options())
    for rule in (make.paper_rule, make.authors_rule):
        text = format_params(rule)
        assert parse_params(text) == rule
        LocalTraining(solver="delta-sgd", solver_params=text)


# ---- the equations ------------------------------------------------------------------------------


def solved_from(start: Any, sub: Subproblem) -> Any:
    """Return a point that tells from where, and towards what, a client trained."""
    return 0.5 * start + 0.25 * sub.centre + 0.125 * sub.slope


@every_form
def test_fedadmm_uploads_what_the_paper_and_the_authors_code_do(form: str) -> None:
    """(2), (3) with w and y/rho of before; the code's 2 (w+ - theta), from theta."""
    rule: Mapping[str, Any] = getattr(FedADMM, f"{form}_rule")
    w, y, theta, rho = START, 0.3 * START, START + 1.0, rule["rho"]
    sides = {name: rule[name] for name in ("local_start", "tracking")}
    oracle = Formula(minimiser=solved_from)
    made = fedadmm.client_rule(fedadmm.State(w, y, rho), theta, oracle, rho=rho, **sides)
    begun = w if form == "paper" else theta
    new = 0.5 * begun + 0.25 * theta + 0.125 * y
    y_new = y + rho * (new - theta)
    printed = (new + y_new / rho) - (w + y / rho)
    expected = printed if form == "paper" else 2 * (new - theta)
    np.testing.assert_allclose(made.upload, expected, rtol=1e-12)


@every_form
def test_fedpd_uploads_what_the_paper_and_the_authors_code_do(form: str) -> None:
    rule: Mapping[str, Any] = getattr(FedPD, f"{form}_rule")
    lam, x0, eta = 0.3 * START, START + 1.0, 0.7
    state = fedpd.State(START, lam)
    oracle = Formula(minimiser=solved_from)
    made = fedpd.client_rule(state, x0, oracle, eta=eta, x0_rule=rule["x0_rule"])
    x = 0.5 * START + 0.25 * x0 + 0.125 * lam
    lam_new = lam + (x - x0) / eta
    base = x if form == "paper" else x0
    np.testing.assert_allclose(made.upload, base + eta * lam_new, rtol=1e-12)


@every_form
def test_fedbc_starts_where_the_paper_and_the_authors_code_do(form: str) -> None:
    rule: Mapping[str, Any] = getattr(FedBC, f"{form}_rule")
    state, z = State(x=START, lam=0.4, gamma=1.0), START + 1.0
    dual = Dual(0.05, 0.05, "heuristic", 0.0, np.inf, rule["dual_momentum"])
    oracle = Formula(minimiser=solved_from)
    made = fedbc.client_rule(state, z, oracle, dual=dual, local_start=rule["local_start"])
    begun = START if form == "paper" else z
    np.testing.assert_allclose(made.state.x, 0.5 * begun + 0.25 * z, rtol=1e-12)


@every_form
def test_fedbcds_server_steps_as_the_paper_and_the_authors_code_do(form: str) -> None:
    """By hand, for three devices with minimisers of their own: a sum over them, or their mean."""
    rule: Mapping[str, Any] = {**getattr(FedBCD, f"{form}_rule"), "eta_z": 0.1, "box": None}
    uploads: dict[int, Any] = {}
    one = FedBCD(**rule, fraction_evaluate=0.0)
    plain = one.aggregate

    def aggregate(state: Any, round: Any, used: Any) -> Any:
        uploads.update({upload.client: upload.vector for upload in used})
        return plain(state, round, used)

    one.aggregate = aggregate  # type: ignore[method-assign]
    z = train(one, grid(quadratics(3)), 1)
    x = np.array([*uploads.values()])
    assert x.shape == (3, DIM)
    step = (START - x).sum(0) * rule["gamma"] if form == "paper" else START - x.mean(0)
    np.testing.assert_allclose(z, START - 0.1 * step, rtol=1e-12)


# ---- studies ------------------------------------------------------------------------------------


def measured() -> Iterator[tuple[str, str, Mapping[str, Any]]]:
    """Yield name, algorithm and hyperparameters of all that has a table."""
    for setting in by_name().values():
        for name, rule in setting.rules.items():
            keys = {**setting.config, **rule.config}
            yield f"{setting.name}, {name}", keys["algorithm"], parse_params(keys.get("params", ""))


def test_no_study_leaves_to_a_default_what_a_paper_prints_otherwise() -> None:
    left = []
    for where, algorithm, params in measured():
        make = STRATEGIES[algorithm]
        for key, printed in getattr(make, "paper_rule", {}).items():
            if make.declarations[key].default != printed and key not in params:
                left.append(f"{where}: {key}")
    assert left == []
