"""FedBC: the server, and clients that come, go and lose replies or their state."""

from __future__ import annotations

import logging
import math
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from federations import lose
from flwr.app import ArrayRecord, Message
from laws import RATE, START, local, quiet, train
from problems import (
    CLIENT_OF,
    DIM,
    Linear,
    Quadratic,
    forget,
    grid,
    kept,
    make_client_app,
    oracle_of,
    quadratics,
    to_record,
    to_vector,
)
from tampering import measured, tampered

from clients import Border, DirectoryStore, LocalTraining, client_id
from clients.node.in_process import InProcessGrid
from fl_strategies import FedBC, PerFedBC, Round, fedbc
from fl_strategies.core.randomness import stream
from fl_strategies.proximity import State, Turn, dual_of, first_state, server_rule

strategy = partial(quiet, FedBC, alpha=0.01)


def states(federation: InProcessGrid, acked: dict[int, int]) -> list[State]:
    """Return the state of each client that the server counts on."""
    return [
        State(x=fields["x"], **{n: fields[n].item() for n in State._fields if n != "x"})
        for fields in kept(federation, acked)
    ]


# ---- the server -------------------------------------------------------------------------------


def test_z_is_the_mean_by_lambda() -> None:
    rng = np.random.default_rng(2)
    x, lam = rng.normal(size=(4, DIM)), np.array([0.3, 0.0, 1.7, 0.01])
    z, total = server_rule(zip(x, lam, strict=True))
    np.testing.assert_allclose(z, lam @ x / lam.sum(), rtol=1e-13)
    assert total == pytest.approx(2.01)
    z, total = server_rule(zip(x, np.zeros(4), strict=True))
    np.testing.assert_allclose(z, x.mean(0), rtol=1e-13)
    assert total == 0.0
    with pytest.raises(ValueError, match="at least one"):
        server_rule([])


def test_where_all_lambda_are_zero_the_mean_is_plain_and_is_announced_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    train(strategy(lambda_max=0.0), grid(quadratics(3)), 3)
    lines = [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]
    said = [line for line in lines if "lambda" in line]
    assert said == ["every lambda of round 1 is 0: the models are averaged with equal weights"]


@pytest.mark.parametrize(
    ("value", "hyperparameters", "reason"),
    [
        (-1.0, {}, "metric 'lambda' must be in [0, 1e+12], got -1.0"),
        (1e300, {}, "metric 'lambda' must be in [0, 1e+12], got 1e+300"),
        (math.nan, {}, "metric 'lambda' is not finite: nan"),
        (3.5, {"lambda_max": 2.0}, "metric 'lambda' must be in [0, 2], got 3.5"),
        (0.1, {"lambda_min": 0.5}, "metric 'lambda' must be in [0.5, 1e+12], got 0.1"),
        (None, {}, "metric 'lambda' is missing"),
    ],
)
def test_a_lambda_out_of_range_is_left_out_with_one_line(
    value: float | None,
    hyperparameters: dict[str, Any],
    reason: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    problems = quadratics(3)
    found = train(strategy(**hyperparameters), tampered(problems, 1, measured("lambda", value)), 1)
    others = strategy(**hyperparameters)
    without = train(others, grid([problems[0], problems[2]]), 1)
    np.testing.assert_allclose(found, without, rtol=1e-12)
    assert [r.getMessage() for r in caplog.records if "left out" in r.getMessage()] == [
        f"reply of client 1 left out: {reason}"
    ]


@pytest.mark.parametrize("make", [FedBC, PerFedBC])
@pytest.mark.parametrize(
    ("hyperparameters", "message"),
    [
        ({"alpha": -0.1}, r"alpha must be >= 0, got -0.1"),
        ({"alpha": {1: 0.1, 5: -1.0}}, r"alpha must be >= 0, got -1.0"),
        ({"alpha_gamma": math.nan}, r"alpha_gamma must be a finite number >= 0.*, got nan"),
        ({"gamma": -1.0}, r"gamma must be >= 0, or one of \['heuristic'\], got -1.0"),
        (
            {"gamma": "free"},
            r"gamma must be a finite number >= 0.*, or one of \['heuristic'\], got 'free'",
        ),
        (
            {"gamma": [0.5, "heuristic"]},
            r"gamma of client 1 must be a finite number >= 0, got 'heu",
        ),
        ({"lambda_min": -0.5}, r"lambda_min must be >= 0, got -0.5"),
        ({"lambda_max": math.nan}, r"lambda_max must be a finite number >= 0.*, got nan"),
        (
            {"lambda_min": 2.0, "lambda_max": 1.0},
            r"lambda_min must be <= lambda_max \(1.0\), got 2",
        ),
        ({"dual_momentum": 0.5, "alpha": {1: 0.1}}, r"must be 0 if alpha .* got 0.5"),
        ({"dual_momentum": 1.0}, r"dual_momentum must be >= 0 and < 1, got 1.0"),
        ({"dual_momentum": -0.5}, r"dual_momentum must be >= 0 and < 1, got -0.5"),
    ],
)
def test_bad_hyperparameters_are_refused_with_bound_and_value(
    make: Any, hyperparameters: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        make(**hyperparameters)


def test_each_client_has_its_own_gamma() -> None:
    gammas = [0.5, 2.0, 0.1]
    one = strategy(gamma=np.array(gammas))
    federation = grid(quadratics(3))
    train(one, federation, 2)
    assert [state.gamma for state in states(federation, one.ledger.acked)] == gammas
    with pytest.raises(
        ValueError, match=r"gamma must be .* one for each client up to client 3, got \[0.5"
    ):
        train(strategy(gamma=gammas), grid(quadratics(4)), 2)


def test_an_unknown_start_is_refused() -> None:
    with pytest.raises(ValueError, match=r"local_start must be one of \['client', 'global'\]"):
        FedBC(local_start="server")  # type: ignore[arg-type]


# ---- clients that come, go and lose their state -------------------------------------------------


def by_the_pure_rule(problems: list[Quadratic], asked: list[dict[int, Turn]], one: FedBC) -> Any:
    """Return z after these rounds of clients' turns, without Flower."""
    training = LocalTraining(solver="gd", lr=RATE, epochs=4)
    z, kept, dual = START, {}, dual_of(one.request(1, 0))
    for server_round, turns in enumerate(asked, start=1):
        for i, turn in sorted(turns.items()):
            problem, rng = problems[i].problem(), stream(0, "local", server_round, i)
            oracle = oracle_of(problem, training, rng)
            received = torch.tensor(z)
            state = kept.get(i, first_state(received, dual=dual))
            kept[i] = fedbc.client_rule(
                state, received, oracle, dual=dual, turn=turn, local_start=one.local_start
            ).state
        z, _ = server_rule((kept[i].x.numpy(), kept[i].lam) for i in sorted(turns))
    return z


@pytest.mark.parametrize(
    "hyperparameters", [{**FedBC.paper_rule}, {**FedBC.authors_rule}, {"gamma": 8.0}], ids=str
)
def test_newcomers_and_returning_clients_follow_the_pure_rule_to_the_bit(
    hyperparameters: dict[str, Any],
) -> None:
    asked: list[dict[int, Turn]] = [{} for _ in range(6)]

    def watch(request: Message, reply: Message) -> Message:
        config = request.content.config_records.get("config", {})
        if request.metadata.message_type == "train":
            turn = Turn(config["dual-clock"], config["dual-after"])
            asked[config["server-round"] - 1][CLIENT_OF[request.metadata.dst_node_id]] = turn
        return reply

    problems = quadratics(6)
    one = strategy(**hyperparameters, fraction_train=0.5)
    found = train(one, grid(problems, fault=watch), 6)
    members = [set(turns) for turns in asked]
    assert members[0] != set(range(6))  # someone comes later
    assert any(i in members[0] and i not in members[1] and i in set.union(*members[2:])
               for i in range(6))  # someone comes back  # fmt: skip
    np.testing.assert_array_equal(found, by_the_pure_rule(problems, asked, one))


class Without(FedBC):
    """Does not ask client 1 in rounds 3 and 4."""

    def select(self, state: Any, round: Round) -> list[int]:
        chosen = super().select(state, round)
        return [c for c in chosen if not (c == 1 and round.number in (3, 4))]


def test_lost_replies_leave_the_state_of_a_run_without_them() -> None:
    problems = quadratics(3)
    hyperparameters = {"alpha": 0.01, "fraction_evaluate": 0.0, "local": local()}
    fault = lose((3, 1), (4, 1))
    losing, sparing = grid(problems, fault=fault), grid(problems)
    one, other = FedBC(**hyperparameters), Without(**hyperparameters)
    np.testing.assert_array_equal(train(one, losing, 6), train(other, sparing, 6))
    for a, b in zip(
        states(losing, one.ledger.acked), states(sparing, other.ledger.acked), strict=True
    ):
        np.testing.assert_array_equal(a.x, b.x)
        assert (a.lam, a.gamma) == (b.lam, b.gamma)
    deaf = grid(problems, fault=fault)
    assert np.abs(train(FedBC(**hyperparameters, acknowledge=False), deaf, 6)
                  - train(other, grid(problems), 6)).max() > 1e-6  # fmt: skip


def test_the_clock_counts_the_dual_steps_of_clients_whose_replies_are_lost() -> None:
    """Present clients were told of them, and made up for them."""

    one = strategy()
    train(one, grid(quadratics(3), fault=lose((1, 1), (2, 1))), 2)
    assert one.state.clock == 2 * 3


def test_a_client_whose_state_is_lost_begins_again_at_z_with_lambda_zero() -> None:
    problems = quadratics(4)
    federation = grid(problems)
    seen: dict[int, Any] = {}
    one = strategy(callbacks=[lambda info: seen.update(info.clients)])
    z = train(one, federation, 3)
    assert seen[2]["lambda"] > 0.0
    forget(federation, 2)
    one.start(federation, to_record(z), 1)
    w = z
    for _ in range(4):
        w = w - RATE * problems[2].gradient(w)
    assert seen[2]["lambda"] == pytest.approx(0.01 * ((w - z) ** 2).sum(), rel=1e-12)
    assert seen[2]["gamma"] == 0.0
    assert seen[1]["gamma"] > 0.0


def test_a_lost_state_may_be_refused(caplog: pytest.LogCaptureFixture) -> None:
    federation = grid(quadratics(3))
    one = strategy(lost_state="refuse")
    z = train(one, federation, 2)
    forget(federation, 0)
    one.start(federation, to_record(z), 1)
    assert "client 0 left out: its acknowledged state is lost" in caplog.text


def test_a_void_round_takes_no_dual_steps() -> None:
    problems = quadratics(3)
    one = strategy(dual_momentum=0.5)
    train(one, grid(problems, fault=lose(*((r, i) for r in (2, 3) for i in range(3)))), 4)
    assert one.state.clock == 2 * 3


def test_a_round_whose_model_its_type_cannot_hold_takes_no_dual_steps() -> None:
    """The mean is finite in double precision, and too large for the model's float32."""
    one = strategy(dual_momentum=0.5)
    one.aggregate = lambda state, *_: (np.full(5, 1e39), state, {})  # type: ignore[method-assign]
    app = make_client_app(quadratics(3), dtype=torch.float32)
    model = Border(Linear().to(torch.float32)).module.state_dict()
    one.start(InProcessGrid(app, 3), ArrayRecord(model), 1)
    assert (one.state.clock, one.ledger.acked) == (0, {})


def test_state_in_a_directory_gives_the_same_model_as_in_the_context(tmp_path: Any) -> None:
    problems = quadratics(4)
    app = make_client_app(problems, store=lambda c: DirectoryStore(tmp_path, client_id(c)))
    hyperparameters = {"fraction_train": 0.5, "dual_momentum": 0.5}
    np.testing.assert_array_equal(
        train(strategy(**hyperparameters), InProcessGrid(app, 4), 5),
        train(strategy(**hyperparameters), grid(problems), 5),
    )


# ---- what a round reports -----------------------------------------------------------------------


def test_history_has_each_clients_weight_and_the_smallest_and_largest_clients_figures() -> None:
    problems = quadratics(4)  # 7, 9, 11 and 13 examples
    seen: list[Any] = []
    one = strategy(callbacks=[seen.append], fraction_evaluate=1.0)
    federation = grid(problems)
    result = one.start(federation, to_record(START), 3)
    z, kept = to_vector(result.arrays), states(federation, one.ledger.acked)
    lam = np.array([state.lam for state in kept])
    info = seen[-1]
    assert list(info.clients) == [0, 1, 2, 3]
    for i, row in info.clients.items():
        assert row["weight-share"] == pytest.approx(lam[i] / lam.sum(), rel=1e-12)
        assert row["data-share"] == pytest.approx((7 + 2 * i) / 40, rel=1e-12)
        assert row["samples"] == row["eval-samples"] == 7 + 2 * i
        assert row["eval-loss"] == pytest.approx(problems[i].value(z), rel=1e-12)
        assert row["own-loss"] == pytest.approx(problems[i].value(kept[i].x), rel=1e-12)
    assert info.metrics["weight-share-smallest"] == pytest.approx(lam[0] / lam.sum())
    assert info.metrics["weight-share-largest"] == pytest.approx(lam[3] / lam.sum())
    assert info.metrics["data-share-largest"] == pytest.approx(13 / 40)
    assert info.metrics["eval-loss-smallest"] == pytest.approx(problems[0].value(z))
    assert info.metrics["eval-loss-largest"] == pytest.approx(problems[3].value(z))
    assert info.metrics["lambda-largest"] == pytest.approx(lam[3])
