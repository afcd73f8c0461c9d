"""Running statistics and numbers of samples that one client sends to harm all others."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import ArrayRecord, Context
from laws import Row, local, one_of_each_mechanism
from scripted import KNOBS, ROWS
from torch import nn

from clients import AnyAlgorithmClient, Border, ContextStore, Problem, client_app, client_id
from clients.node.in_process import InProcessGrid
from fl_strategies import FedAvg, FederatedStrategy
from fl_strategies.core.layout import BufferMean
from fl_strategies.messages.wire import MAX_SAMPLES
from fl_strategies.server import stages

CLIENTS, HOSTILE, SAMPLES, ROUNDS = 4, 2, 8, 2


def normalised() -> Border:
    parts = [("norm", nn.BatchNorm1d(3)), ("in", nn.Linear(3, 4)), ("out", nn.Linear(4, 1))]
    torch.default_generator.manual_seed(1)  # torch.manual_seed would seed the GPUs as well
    return Border(nn.Sequential(OrderedDict(parts)).double(), head="out")


class Client(AnyAlgorithmClient):
    """The hostile one's ``lie`` changes what it sends; without one it fails."""

    lie: Any = None

    def fit(self, parameters: Any, config: Any) -> Any:
        arrays, samples, metrics = super().fit(parameters, config)
        if self.client_id != HOSTILE:
            return arrays, samples, metrics
        if self.lie is None:
            raise RuntimeError("no reply")
        variance, samples = self.lie
        metrics.pop("checksums", None)
        place = self.array_names.index("norm.running_var")
        arrays[place] = np.full_like(arrays[place], variance)
        return arrays, samples, metrics


def run(
    strategy: FederatedStrategy,
    lie: tuple[float, float] | None,
    *,
    hosted: bool = False,
    begun: ArrayRecord | None = None,
) -> tuple[list[np.ndarray], dict[int, Any]]:
    """Return the model after the rounds and the clients' evaluation in each."""
    model = normalised()

    def client_fn(context: Context) -> AnyAlgorithmClient:
        number = client_id(context)
        x = torch.arange(3.0 * SAMPLES).reshape(SAMPLES, 3).sin().double() + number
        problem = Problem(model, nn.functional.mse_loss, x, x.sum(1, keepdim=True))
        client = Client(problem, test=problem, client_id=number, store=ContextStore(context))
        client.lie = lie
        return client

    hosts = [*range(CLIENTS)] if hosted else None
    grid = InProcessGrid(client_app(client_fn, hosts=hosts), 1 if hosted else CLIENTS)
    begun = begun or ArrayRecord(normalised().module.state_dict())
    result = strategy.start(grid, begun, ROUNDS)
    return [array.numpy() for array in result.arrays.values()], result.evaluate_metrics_clientapp


def strategy_of(row: Row, **options: Any) -> FederatedStrategy:
    usual = {"local": local(lr=0.01, epochs=1), "fraction_evaluate": 1.0}
    return row.strategy(**{**KNOBS.get(row.name, {}), **usual, **options})


@pytest.mark.parametrize(
    ("bound", "fold"), [(None, False), (10.0, True)], ids=["each upload", "one mean, bounded"]
)
@one_of_each_mechanism
def test_a_client_with_a_negative_variance_and_countless_samples_is_as_one_that_failed(
    row: Row, bound: float | None, fold: bool
) -> None:
    if fold and not ROWS[row.name].strategy(local=local()).folds:
        pytest.skip("its hosts send each upload")

    def found(lie: tuple[float, float] | None) -> tuple[list[np.ndarray], dict[int, Any]]:
        options = {"clipping_norm": bound, "fold": "on" if fold else "auto"}
        return run(strategy_of(row, **options), lie, hosted=fold)

    expected, _ = found(None)
    arrays, evaluated = found((-1e6, MAX_SAMPLES))
    for one, other in zip(arrays, expected, strict=True):
        np.testing.assert_array_equal(one, other)
    losses = [metrics["eval-loss"] for metrics in evaluated.values()]
    assert len(losses) == ROUNDS
    assert np.isfinite(losses).all()


@pytest.mark.parametrize("hosted", [False, True], ids=["server", "host"])
def test_who_reports_more_than_max_samples_is_as_one_that_failed(
    hosted: bool, caplog: pytest.LogCaptureFixture
) -> None:
    def found(lie: tuple[float, float] | None, **options: Any) -> list[np.ndarray]:
        fold = "on" if hosted else "off"
        return run(strategy_of(ROWS["fedavg"], fold=fold, **options), lie, hosted=hosted)[0]

    expected = found(None)
    within = found((1.0, SAMPLES + 1))
    for one, other in zip(found((1.0, SAMPLES + 1), max_samples=SAMPLES), expected, strict=True):
        np.testing.assert_array_equal(one, other)
    said = f"it reports {SAMPLES + 1} samples, at most {SAMPLES} (max_samples) are taken"
    assert said in caplog.text
    bounded = found((1.0, SAMPLES + 1), max_samples=SAMPLES + 1)
    for one, other in zip(bounded, within, strict=True):
        np.testing.assert_array_equal(one, other)


def test_a_merged_variance_below_zero_makes_the_round_void(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    class Wrong(BufferMean):
        def value(self) -> dict[str, np.ndarray]:
            return {name: -array for name, array in super().value().items()}

    monkeypatch.setattr(stages, "BufferMean", Wrong)
    arrays, _ = run(strategy_of(ROWS["fedavg"]), (1.0, SAMPLES))
    for one, other in zip(arrays, normalised().module.state_dict().values(), strict=True):
        np.testing.assert_array_equal(one, other)
    said = "the aggregated model cannot be used: array 'norm.running_var' holds variances, and"
    assert said in caplog.text


def test_an_initial_model_with_a_negative_variance_is_refused() -> None:
    initial = normalised().module.state_dict()
    initial["norm.running_var"][1] = -0.5
    with pytest.raises(ValueError, match=r"'norm\.running_var' .* element 1 is -0\.5, < 0"):
        run(FedAvg(), None, begun=ArrayRecord(initial))
