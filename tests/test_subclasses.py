"""A subclass that overrides Flower's hooks, and a config that changes: as with Flower's FedAvg."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from federations import lose, serve
from flwr.app import ConfigRecord, MetricRecord
from flwr.serverapp.strategy import FedAvg as FlowerFedAvg
from laws import START, local
from problems import grid, quadratics, to_record, to_vector

from fl_strategies import Checkpoints, FedADMM, FedAvg, as_legacy


def started(strategy: Any, rounds: int = 3, **options: Any) -> Any:
    return strategy.start(grid(quadratics(2)), to_record(START), rounds, **options)


class Adds:
    """Adds a number to a round's metrics."""

    def aggregate_train(self, *arguments: Any) -> Any:
        arrays, metrics = super().aggregate_train(*arguments)  # type: ignore[misc]
        return arrays, MetricRecord({**metrics, "mine": 7.0})


class Rests:
    """Has nobody train in round 2."""

    def configure_train(self, number: int, *arguments: Any) -> Any:
        return [] if number == 2 else super().configure_train(number, *arguments)  # type: ignore[misc]


class Seldom:
    """Has clients evaluate in round 2 alone."""

    def configure_evaluate(self, number: int, *arguments: Any) -> Any:
        return super().configure_evaluate(number, *arguments) if number == 2 else []  # type: ignore[misc]


@pytest.mark.parametrize("own", [Adds, Rests, Seldom])
@pytest.mark.parametrize("evaluates", [0.0, 1.0])
def test_hooks_are_called_and_their_results_used_as_by_flower(own: Any, evaluates: float) -> None:
    ours, theirs = (
        started(
            type("Own", (own, base), {"averages": "models"})(
                fraction_evaluate=evaluates, **options
            ),
            train_config=ConfigRecord({"lr": 0.2, "solver": "gd"}),
        )
        for base, options in ((FedAvg, {}), (FlowerFedAvg, {"min_available_nodes": 2}))
    )
    np.testing.assert_allclose(to_vector(ours.arrays), to_vector(theirs.arrays), rtol=1e-12)
    assert ours.skipped == []
    for name in ("train_metrics_clientapp", "evaluate_metrics_clientapp"):
        mine, expected = getattr(ours, name), getattr(theirs, name)
        assert mine.keys() == expected.keys()
        for number, row in expected.items():
            same = {key: mine[number][key.replace("_", "-")] for key in row}
            assert same == pytest.approx(dict(row))


@pytest.mark.parametrize("hook", ["configure_train", "configure_evaluate"])
def test_requests_that_super_did_not_make_are_refused(hook: str) -> None:
    def own(self: Any, number: int, arrays: Any, config: Any, grid: Any) -> Any:
        return FlowerFedAvg(min_available_nodes=2).configure_train(number, arrays, config, grid)

    with pytest.raises(ValueError, match=rf"^Own.{hook} must return the requests of super"):
        started(type("Own", (FedAvg,), {hook: own})(local=local()))


def test_a_config_may_be_filled_later_but_not_set_what_the_strategy_sends() -> None:
    given, rates = ConfigRecord(), list[Any]()

    class Notes(FedAvg):
        def configure_train(self, *arguments: Any) -> Any:
            messages = [*super().configure_train(*arguments)]
            rates.append(messages[0].content["config"].get("lr"))
            return messages

    def fill(number: int, arrays: Any) -> None:
        given["lr"] = 0.1 * 0.5**number

    started(Notes(fraction_evaluate=0.0), train_config=given, evaluate_fn=fill)
    assert rates == [0.1, 0.05, 0.025]
    with pytest.raises(ValueError, match=r"must not set \['lr'\]: the strategy does"):
        started(Notes(local=local()), train_config=(given := ConfigRecord()), evaluate_fn=fill)


@pytest.mark.parametrize(
    ("options", "config"),
    [({}, {"lr": 0.1}), ({}, {}), ({"clipping_norm": 9.0}, {"lr": 0.2}),
     ({"weighted_by_key": "other"}, {"lr": 0.2})],
)  # fmt: skip
def test_a_run_is_not_resumed_with_another_config(
    options: dict[str, Any], config: dict[str, Any], tmp_path: Path
) -> None:
    def of(**options: Any) -> FedAvg:
        return FedAvg(checkpoints=Checkpoints(tmp_path), fraction_evaluate=0.0, **options)

    started(of(), 2, train_config=ConfigRecord({"lr": 0.2}))
    with pytest.raises(ValueError, match=r" was .*, is "):
        started(of(**options), 4, train_config=ConfigRecord(config), resume=True)
    started(of(), 4, train_config=ConfigRecord({"lr": 0.2}), resume=True)


def test_after_evaluate_fn_raised_the_result_has_the_model_of_the_clients_states() -> None:
    def run(fails: bool) -> np.ndarray:
        def evaluate(number: int, arrays: Any) -> None:
            if fails and number == 2:
                raise OSError

        one, on = FedADMM(local=local(), fraction_evaluate=0.0), grid(quadratics(2))
        try:
            one.start(on, to_record(START), 2, evaluate_fn=evaluate)
        except OSError:
            assert fails
        return to_vector(one.start(on, one.result.arrays, 3).arrays)

    np.testing.assert_array_equal(run(True), run(False))


def test_two_fits_of_a_legacy_server_are_two_starts_also_if_replies_are_lost() -> None:
    def both(legacy: bool) -> np.ndarray:
        lost = lose((3, 1), (4, 1), masked=legacy)
        one, on = FedADMM(local=local(), fraction_evaluate=0.0), grid(quadratics(2), fault=lost)
        if legacy:
            adapter = as_legacy(one, to_record(START))
            serve(adapter, on, 2)
            return serve(adapter, on, 3)[0]
        first = one.start(on, to_record(START), 2).arrays
        return to_vector(one.start(on, first, 3).arrays)

    np.testing.assert_array_equal(both(True), both(False))


def test_a_metric_that_is_a_list_of_some_clients_alone_is_left_out(
    caplog: pytest.LogCaptureFixture,
) -> None:

    def mixed(request: Any, reply: Any) -> Any:
        if request.metadata.message_type == "train":
            first = request.metadata.dst_node_id == min(on.get_node_ids())
            reply.content["metrics"]["mine"] = 5.0 if first else [1.0, 2.0]
        return reply

    on = grid(quadratics(2), fault=mixed)
    result = FedAvg(local=local(), fraction_evaluate=0.0).start(on, to_record(START), 1)
    assert "mine" not in result.train_metrics_clientapp[1]
    assert "metrics that are lists of some clients are left out: ['mine']" in caplog.text
