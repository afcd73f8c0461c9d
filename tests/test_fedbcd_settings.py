"""FedBCD and FedBCD-I: clock, hyperparameters, evaluation."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from bcd import CLOUD_RULES, devices, fedbcd_, fedbcd_i_
from flwr.app import Message
from laws import START, STEPS, local, train
from problems import NODES, forget, grid, make_client_app, quadratics, to_record

from clients.node.in_process import InProcessGrid
from fl_strategies import STRATEGIES, FedBCD, FedBCDI, RoundInfo
from fl_strategies.parts import Exponential


def test_a_round_lasts_until_its_slowest_device_is_done() -> None:
    seen: list[RoundInfo] = []
    one = fedbcd_(servers=2, fraction_train=0.34, callbacks=[seen.append], seed=5)
    one.clock = Exponential(mean_arrival=3.0, mean_work=0.2)
    train(one, grid(quadratics(6)), 3)
    now = 0.0
    for t, info in enumerate(seen, start=1):
        done = []
        for cloud in ((0, 2, 4), (1, 3, 5)):
            first = min(cloud, key=lambda i: one.device_clock.begins(5, t, i))
            done.append(one.device_clock.seconds(5, t, first, STEPS))
        now += max(done)
        assert info.metrics["virtual-seconds"] == pytest.approx(now, rel=1e-12)
        assert info.metrics["clients-asked"] == 2


def test_every_cloud_server_has_an_active_device_however_small_the_fraction() -> None:
    one = fedbcd_(servers=3, fraction_train=0.01)
    train(one, grid(quadratics(6)), 1)
    assert sorted(client % 3 for client in one.ledger.acked) == [0, 1, 2]


@pytest.mark.parametrize("name", CLOUD_RULES)
def test_a_device_by_which_a_summed_step_would_leave_its_bound_takes_no_part(
    name: str, caplog: pytest.LogCaptureFixture
) -> None:
    """eta_z gamma |Q| is 1 with four devices, and would be 1.25 with a fifth."""
    options: dict[str, Any] = {"box": None, "reduce": "sum", "eta_z": 0.5, "gamma": 0.5}
    one = STRATEGIES[name](**options, local=local(), fraction_evaluate=1.0, node_wait=0.01)
    federation = grid(quadratics(5))
    fifth = federation.contexts.pop(NODES[4])
    z = train(one, federation, 2)
    assert "must be <= 1" not in caplog.text
    federation.contexts[NODES[4]] = fifth
    result = one.start(federation, to_record(z), 2)
    told = "client 4 does not take part: eta_z * gamma * |Q| must be <= 1"
    assert caplog.text.count(told) == 1
    assert f"got {1.25:g}" in caplog.text
    assert [m["clients-asked"] for m in result.train_metrics_clientapp.values()] == [4, 4]
    assert result.evaluate_metrics_clientapp[4]["eval-clients-used"] == 5  # it may still measure


@pytest.mark.parametrize("name", ["fedbcd", "fedbcd-async"])
@pytest.mark.parametrize("backwards", [False, True])
def test_devices_begin_anew_as_long_as_a_summed_step_keeps_its_bound(
    name: str, backwards: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """Of two that lost their state there is room for one beside what it was: the first by id."""

    class Ordered(InProcessGrid):
        def send_and_receive(self, messages: Any, *, timeout: float | None = None) -> Any:
            replies = list(super().send_and_receive(messages, timeout=timeout))
            return replies[::-1] if backwards else replies

    problems = quadratics(4)
    federation = Ordered(make_client_app(problems), 4)
    options: dict[str, Any] = {"box": None, "reduce": "sum", "eta_z": 0.4, "gamma": 0.5}
    one = STRATEGIES[name](**options, local=local(), fraction_evaluate=0.0)
    z = train(one, federation, 3)
    forget(federation, 1)
    forget(federation, 2)
    result = one.start(federation, to_record(z), 2)
    counts = [m["clients-rejected"] for m in result.train_metrics_clientapp.values()]
    assert counts == [1, 1]
    assert caplog.text.count("reply of client 2 left out: it lost its state and would be one") == 2
    assert sum(book.weight for book in one.state.sums) == pytest.approx(0.5 * 5)
    total = 0.4 * sum(book.weight for book in one.state.sums)
    assert total <= 1.0 + 1e-12


def test_a_mean_has_room_for_every_device() -> None:
    one = fedbcd_(gamma=9.0)
    train(one, grid(quadratics(4)), 1)
    one.nodes.known |= {7, 8, 9}
    assert {7, 8, 9} <= one.on_connect(one.state, one.nodes.known).cloud_of.keys()


@pytest.mark.parametrize("name", ["box", "extrapolation"])
def test_what_the_strategy_sets_itself_is_not_taken_from_local(name: str) -> None:
    with pytest.raises(ValueError, match=f"{name} of local is this strategy's to set"):
        FedBCD(local={name: 0.3})
    FedBCD(local={"box": 2.0, "extrapolation": 0.0})


def test_the_history_has_each_devices_weight_by_gamma() -> None:
    rows: list[dict[int, dict[str, float]]] = []
    one = fedbcd_(gamma=[1.0, 2.0, 5.0], callbacks=[lambda info: rows.append(dict(info.clients))])
    train(one, grid(quadratics(3)), 1)
    assert [rows[0][i]["weight-share"] for i in range(3)] == pytest.approx([1 / 8, 2 / 8, 5 / 8])


def test_blocks_and_modulo_tell_which_cloud_server_a_device_has() -> None:
    for assignment, expected in (("modulo", [0, 1, 2, 0, 1, 2]), ("blocks", [0, 0, 1, 1, 2, 2])):
        one = fedbcd_(servers=3, assignment=assignment)
        train(one, grid(quadratics(6)), 1)
        assert [one.state.cloud_of[i] for i in range(6)] == expected
    one.nodes.known |= {6, 7}
    state = one.on_connect(one.state, one.nodes.known)
    assert [state.cloud_of[6], state.cloud_of[7]] == [0, 1]  # where the fewest are
    assert state.sums[0].weight == 3.0


def test_the_devices_own_models_are_measured_beside_the_common_one() -> None:
    problems = quadratics(3)
    for make in (fedbcd_, fedbcd_i_):
        federation, one = grid(problems), make(fraction_evaluate=1.0)
        result = one.start(federation, to_record(START), 2)
        kept = devices(federation, one.ledger.acked)
        own = [q.value(kept[i]["x"]) for i, q in enumerate(problems)]
        expected = np.average(own, weights=[q.n for q in problems])
        metrics = result.evaluate_metrics_clientapp[2]
        assert metrics["own-loss"] == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("name", CLOUD_RULES)
@pytest.mark.parametrize(
    ("hyperparameters", "message"),
    [
        ({"gamma": 0.0}, r"gamma must be > 0.*, got 0.0"),
        ({"gamma": [0.5, -1.0]}, r"gamma of client 1 must be > 0.*, got -1.0"),
        ({"gamma": []}, r"gamma must be a number, or one for each client, got \[\]"),
        ({"eta_z": 1.5}, r"eta_z must be > 0 and <= 1, got 1.5"),
        ({"zeta": 1.0}, r"zeta must be >= 0 and < 1, got 1.0"),
        ({"zeta": -0.1}, r"zeta must be >= 0 and < 1, got -0.1"),
        ({"box": 0.0}, r"box must be > 0, got 0.0"),
        ({"reduce": "max"}, r"reduce must be one of \['mean', 'sum'\], got 'max'"),
        ({"repeats": 0}, r"repeats must be an integer >= 1, got 0"),
        ({"repeats": 1.5}, r"repeats must be an integer >= 1, got 1.5"),
        ({"servers": 0}, r"servers must be an integer >= 1, got 0"),
        ({"assignment": "random"}, r"assignment must be one of \['modulo', 'blocks'\]"),
        (
            {"reduce": "sum", "min_available_nodes": 3},
            r'eta_z \* gamma \* \|Q\| must be <= 1 with reduce="sum", got .* for \|Q\| = 3 devices',
        ),
    ],
)
def test_bad_hyperparameters_are_refused_with_bound_and_value(
    name: str, hyperparameters: dict[str, Any], message: str
) -> None:
    extra = (
        {"eta_z": 2.0}
        if "reduce" in hyperparameters and "min_available_nodes" in hyperparameters
        else {}
    )
    with pytest.raises(ValueError, match=message):
        STRATEGIES[name](**hyperparameters, **extra)


@pytest.mark.parametrize(
    ("hyperparameters", "message"),
    [
        ({"gamma": 1.1}, r"gamma must be > 0 and <= 1, got 1.1"),
        ({"offline_rounds": 0}, r"offline_rounds must be an integer >= 1, got 0"),
        ({"fraction_available": 0.0}, r"fraction_available must be > 0 and <= 1, got 0.0"),
    ],
)
def test_bad_hyperparameters_of_fedbcd_i_are_refused(
    hyperparameters: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        FedBCDI(**hyperparameters)


@pytest.mark.parametrize("name", CLOUD_RULES)
@pytest.mark.parametrize(
    ("hyperparameters", "message"),
    [
        ({"box": 2.5}, r"box must hold the initial model, whose largest entry is 3, got 2.5"),
        ({"servers": 3}, r"servers must divide the number of clients, 4, got 3"),
        (
            {"reduce": "sum", "eta_z": 0.3, "gamma": 0.9},
            r'must be <= 1 with reduce="sum", got 1.08',
        ),
        (
            {"gamma": [0.1, 0.2]},
            r"gamma must be a number, or one for each client up to client \d, got",
        ),
    ],
)
def test_what_clients_or_the_model_rule_out_is_refused_before_any_training(
    name: str, hyperparameters: dict[str, Any], message: str
) -> None:
    asked: list[str] = []

    def watch(request: Message, reply: Message) -> Message:
        asked.append(request.metadata.message_type)
        return reply

    one = STRATEGIES[name](**{"box": None, "local": local(), **hyperparameters})
    with pytest.raises(ValueError, match=message):
        train(one, grid(quadratics(4), fault=watch), 1)
    assert "train" not in asked
