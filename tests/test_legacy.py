"""`as_legacy`: the same model from a legacy server as from the Message API.

Mutants tried by hand, each caught here: the reply of another request; failures with a status
dropped; numbers of the config; no end of a round without evaluation; the request's arrays given
back; the client's own id left out; a stop that asks on; arrays read by `numpy.load`; a client's
metrics in the place of its examples or loss; no guard around results, queries and initial models;
nodes that must have a number for their id.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from federations import CLIENTS, Proxy, Strangers, drop, run_legacy, serve
from flwr.app import ArrayRecord, MetricRecord
from flwr.server import SimpleClientManager
from laws import START, TABLE, Row, local
from problems import DIM, NODES, Linear, grid, make_client_app, quadratics, to_record, to_vector

from clients import Border
from clients.node.in_process import InProcessGrid
from fl_strategies import STRATEGIES, EarlyStop, FedADMM, FedAvg, RoundInfo, as_legacy
from fl_strategies.core.reasons import brief


@pytest.mark.parametrize(
    "row", [row for row in TABLE if not STRATEGIES[row.name]().overlaps], ids=str
)
@pytest.mark.sampled
def test_the_model_is_that_of_the_message_api_to_the_bit(row: Row) -> None:
    options = {"min_available_nodes": CLIENTS, "local": local(), "fraction_train": 0.5, "seed": 3}
    usual = row.strategy(**options).start(grid(quadratics(CLIENTS)), to_record(START), 5).arrays
    legacy, _ = run_legacy(row.strategy(**options), 5)
    np.testing.assert_array_equal(legacy, to_vector(usual))


@pytest.mark.slow
def test_lost_replies_leave_fedadmms_invariant_as_they_do_with_the_message_api() -> None:
    options: dict[str, Any] = {
        "min_available_nodes": CLIENTS,
        "fraction_evaluate": 0.0,
        "local": local(),
    }
    usual = FedADMM(rho=0.5, **options).start(
        grid(quadratics(CLIENTS), fault=drop(0.3)), to_record(START), 20
    )
    strategy = FedADMM(rho=0.5, **options)
    legacy, _ = run_legacy(strategy, 20, on=grid(quadratics(CLIENTS), fault=drop(0.3)))
    lost = [m["clients-lost"] for m in strategy.result.train_metrics_clientapp.values()]
    assert sum(lost) > 5
    np.testing.assert_array_equal(legacy, to_vector(usual.arrays))


def test_a_client_that_answers_with_a_bad_status_is_left_out_by_name(
    caplog: pytest.LogCaptureFixture,
) -> None:
    strategy = FedAvg(min_available_nodes=CLIENTS, fraction_evaluate=0.0, local=local())
    adapter = as_legacy(strategy, to_record(START))
    manager = SimpleClientManager()
    for i in range(2):
        manager.register(Proxy(NODES[i], fails=i == 1))
    strategy.min_available_nodes = 2
    instructions = adapter.configure_fit(1, adapter.initialize_parameters(manager), manager)
    results = [(proxy, proxy.fit(ins, None, None)) for proxy, ins in instructions]
    good, bad = (
        [r for r in results if (r[1].status.code.value == 0) is ok] for ok in (True, False)
    )
    _, metrics = adapter.aggregate_fit(1, good, [*bad, TimeoutError("nobody knows whose")])
    assert (metrics["clients-used"], metrics["clients-rejected"]) == (1, 1)
    assert f"client {brief(NODES[1])} left out: out of disk" in caplog.text


def test_callbacks_and_evaluation_see_every_round_and_a_stop_asks_nobody_any_more() -> None:
    seen: list[RoundInfo] = []

    def note(info: RoundInfo) -> bool:
        seen.append(info)
        return info.server_round == 3

    def evaluate(server_round: int, arrays: ArrayRecord) -> MetricRecord:
        return MetricRecord(
            {"test-loss": float(np.abs(to_vector(arrays)).sum()), "test-accuracy": 0.1}
        )

    options: dict[str, Any] = {"min_available_nodes": CLIENTS, "local": local()}
    for fraction in (0.0, 1.0):
        seen.clear()
        strategy = FedAvg(fraction_evaluate=fraction, callbacks=[note], **options)
        model, history = run_legacy(strategy, 6, num_rounds=6, evaluate_fn=evaluate)
        assert [(info.server_round, info.num_rounds) for info in seen] == [
            (t, 6) for t in (1, 2, 3)
        ]
        assert all("test-loss" in info.metrics for info in seen)
        assert ("eval-loss" in seen[0].metrics) is (fraction == 1.0)
        assert [t for t, _ in history.losses_centralized] == [0, 1, 2, 3]
        assert [t for t, _ in history.losses_distributed] == [1, 2, 3] * (fraction == 1.0)
        np.testing.assert_array_equal(model, to_vector(seen[-1].arrays))


def test_without_an_initial_model_a_client_gives_its_own() -> None:
    strategy = FedAvg(min_available_nodes=CLIENTS, fraction_evaluate=0.0, local=local())
    on = grid(quadratics(CLIENTS))
    model, _ = serve(as_legacy(strategy), on, 2)
    zeros = Border(Linear()).module.state_dict()  # the model as the problems make it
    usual = FedAvg(fraction_evaluate=0.0, local=local()).start(
        grid(quadratics(CLIENTS)), ArrayRecord(zeros), 2
    )
    np.testing.assert_array_equal(model, to_vector(usual.arrays))


def test_a_users_own_client_works_with_our_fedavg_unchanged() -> None:
    app = make_client_app(quadratics(3), client=Strangers)
    strategy = FedAvg(min_available_nodes=3, fraction_evaluate=0.0)
    model, _ = run_legacy(strategy, 2, on=InProcessGrid(app, 3))
    mean = np.arange(DIM) * 2.0
    np.testing.assert_allclose(model, mean + 0.25 * (START - mean), rtol=1e-12)


def test_asynchronous_fedbcd_is_refused() -> None:
    row = next(row for row in TABLE if row.name == "fedbcd-async")
    with pytest.raises(ValueError, match="FedBCDAsync has no legacy form"):
        as_legacy(row.strategy(local=local()), to_record(START))


def test_early_stopping_ends_the_asking() -> None:
    strategy = FedAvg(
        min_available_nodes=CLIENTS,
        fraction_evaluate=0.0,
        local=local(),
        callbacks=[EarlyStop(target=0.05)],
    )
    run_legacy(strategy, 4, evaluate_fn=lambda t, arrays: MetricRecord({"test-accuracy": 0.1}))
    assert list(strategy.result.train_metrics_clientapp) == [1]
