"""A round is a value: what it comes to depends on it, on the state and on the uploads alone."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import pytest
from laws import START, TABLE, Row, local, train
from problems import grid, quadratics
from scripted import same

from fl_strategies import FedAvg, Round, Upload
from fl_strategies.core.layout import Layout
from fl_strategies.server import strategy as module
from fl_strategies.server.round import Outcome, next_model


class Seen(NamedTuple):
    state: Any
    round: Round
    uploads: list[Upload]
    outcome: Outcome


OPTIONS: dict[str, Any] = {"local": local(), "fraction_train": 0.5, "seed": 3}


class Noted(NamedTuple):
    row: Row
    rounds: list[Seen]


@pytest.fixture(scope="module", params=TABLE, ids=str)
def noted(request: pytest.FixtureRequest) -> Noted:
    """Return the four rounds of an algorithm's run, with what each came to."""
    rounds: list[Seen] = []

    def note(one: Any, state: Any, round: Round, uploads: Any, **options: Any) -> Outcome:
        before = copy.deepcopy((state, round, list(uploads)))
        outcome = next_model(one, state, round, uploads, **options)
        rounds.append(Seen(*before, copy.deepcopy(outcome)))
        return outcome

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(module, "next_model", note)
        train(request.param.strategy(**OPTIONS), grid(quadratics(4)), 4)
    assert len(rounds) == 4
    return Noted(request.param, rounds)


def test_a_strategy_that_never_ran_computes_a_runs_rounds_anew(noted: Noted) -> None:
    """So hooks read declared hyperparameters and their arguments, and nothing of the run."""
    for state, round, uploads, outcome in noted.rounds:
        fresh, before = noted.row.strategy(**OPTIONS), copy.deepcopy((state, round, uploads))
        assert same(next_model(fresh, state, round, uploads), outcome)
        assert same((state, round, uploads), before)
        if not fresh.overlaps:  # whose cloud servers select one by one
            assert fresh.select(state, replace(round, asked=())) == [*round.asked]
        for client in round.asked:
            assert dict(fresh.client_config(state, round, client)) is not None


def test_what_the_server_keeps_changes_a_later_round(noted: Noted) -> None:
    """Its model or, where the server keeps what clients are told, its requests."""
    first, (last, round, uploads, _) = noted.rounds[0].state, noted.rounds[-1]

    def made(state: Any) -> Any:
        one = noted.row.strategy(**OPTIONS)
        config = [dict(one.client_config(state, round, client)) for client in round.connected]
        model = next_model(one, state, round, uploads).model
        return model, config, dict(one.vectors(state, round))

    assert last is None or not same(made(first), made(last))


def upload(client: int, *numbers: float, samples: int = 1) -> Upload:
    return Upload(client, np.array(numbers), samples)


def a_round(**options: Any) -> Round:
    layout = Layout.of({"w": np.zeros(2, np.float32)})
    return Round(theta=np.array([3.0, 4.0]), layout=layout, **options)


def test_a_round_of_too_few_uploads_is_skipped_with_the_reason() -> None:
    outcome = next_model(FedAvg(min_replies=2), None, a_round(), [upload(1, 1.0, 2.0)])
    assert outcome.model is None
    assert outcome.skipped == "1 usable replies, at least 2 needed"


def test_a_model_that_overflows_its_type_is_skipped() -> None:
    outcome = next_model(FedAvg(), None, a_round(), [upload(1, 1e39, 2.0)])  # fits float64 alone
    assert (outcome.model, outcome.skipped) == (None, "the aggregated model is not finite")


def test_an_algorithm_averages_by_the_rounds_mean() -> None:
    """Which may be another one than the weighted mean."""

    def first(pairs: Any) -> Any:
        return next(iter(pairs))[0]

    uploads = [upload(1, 1.0, 2.0), upload(2, 5.0, 6.0, samples=7)]
    for row in TABLE:
        strategy = row.strategy(local=local())
        if strategy.averages == "models":
            outcome = next_model(
                strategy, strategy.first_state(START[:2]), a_round(mean=first), uploads
            )
            assert outcome.model is not None
            np.testing.assert_array_equal(outcome.model["w"], [1.0, 2.0])


def test_a_schedule_is_read_by_the_rounds_number() -> None:
    one = FedAvg(local={"lr": {1: 0.1, 3: 0.5}})
    assert [one.request(number, 0)["lr"] for number in (1, 2, 3, 4)] == [0.1, 0.1, 0.5, 0.5]
