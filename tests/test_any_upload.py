"""One law over the parts: whatever one client uploads, and whoever it is, no run ends by it.

It moves nothing beyond the part's bound, and leaves no part with a state that cannot be used.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

from clients import InProcessGrid
from fl_strategies import FedAvg, FederatedStrategy, FedSGD, Round
from fl_strategies.core.clipping import norm
from fl_strategies.messages.codes import lengthened
from fl_strategies.messages.one_process import node_ids
from fl_strategies.messages.wire import decoded
from fl_strategies.parts import (
    L1,
    PARTS,
    QSGD,
    Adagrad,
    Adam,
    Bernoulli,
    BFloat16,
    Buffered,
    BySize,
    Clock,
    Combine,
    Daily,
    Deadline,
    Exponential,
    FedExP,
    GeometricMedian,
    Krum,
    Markov,
    Median,
    Momentum,
    MultiKrum,
    Part,
    Probabilities,
    ServerStep,
    TrimmedMean,
    Yogi,
    parse_part,
)
from fl_strategies.server.callbacks import RoundInfo
from fl_strategies.server.checkpoints import fields_of
from fl_strategies.server.stages import selected

CLIENTS = 7
HOSTILE = 3
TYPES = [np.float32, np.float64]
COUNTER = "num_batches_tracked"
BUFFERS = ["running_mean", "running_var", COUNTER, "no_elements"]
Arrays = dict[str, np.ndarray]
Attack = Callable[[Arrays, int], Arrays | None]
"""What the hostile client sends in a round in place of an honest upload; None is an error."""


def extremes(dtype: Any) -> list[float]:
    """Finite numbers of the type, of which squares, sums or differences overflow or vanish."""
    most = float(np.finfo(dtype).max)
    return [0.0, -1.0, 1e30, math.sqrt(most) * 10, most, -most, float(np.finfo(dtype).tiny)]


def initial(dtype: Any) -> Arrays:
    zeros = {name: np.zeros(2, dtype) for name in ("w", "v", "running_mean", "running_var")}
    return {**zeros, COUNTER: np.array(0), "no_elements": np.zeros((0, 3), dtype)}


def honest(arrays: Arrays, client: int) -> Arrays:
    return {n: a + np.asarray((client + 1) * 0.1 ** (a.dtype.kind == "f"), a.dtype)
            for n, a in arrays.items()}  # fmt: skip


class Federation:
    """Clients without a library of ours; the ``hostile`` one uploads what ``attack`` says.

    ``uploads`` holds the honest uploads of the current round, ``models`` the global models.
    """

    def __init__(self, attack: Attack, clients: int = CLIENTS) -> None:
        self.uploads: dict[int, Arrays] = {}
        self.models: list[Arrays] = []
        self.attack, app = attack, ClientApp()

        @app.train()
        def train(message: Message, context: Any) -> Message:
            client = int(context.node_config["partition-id"])
            config = message.content["config"]
            short = np.dtype(str(config.get("download", "<f8")))
            sent = decoded(message.content["arrays"])
            arrays = {n: lengthened(a, short) for n, a in sent.items()}
            upload: Arrays | None = honest(arrays, client)
            server_round = int(config["server-round"])
            if client == HOSTILE and (upload := self.attack(arrays, server_round)) is None:
                raise RuntimeError("no reply of mine")
            if client != HOSTILE:
                self.uploads[client] = upload
            record = ArrayRecord({n: Array(np.asarray(a)) for n, a in upload.items()})
            metrics = MetricRecord({"num-examples": client + 1})
            return Message(RecordDict({"arrays": record, "metrics": metrics}), reply_to=message)

        self.grid = InProcessGrid(app, clients)

    def train(self, strategy: FederatedStrategy, start: Arrays, rounds: int) -> Any:
        self.models = [start]
        return strategy.start(
            self.grid, ArrayRecord({n: Array(a) for n, a in start.items()}), rounds
        )

    def seen(self, info: RoundInfo) -> None:
        self.models.append(decoded(info.arrays))


def made(**options: Any) -> FedAvg:
    return FedAvg(**{"fraction_evaluate": 0.0, "quiet": True, "buffers": BUFFERS, **options})


def whole(arrays: Mapping[str, np.ndarray], kind: str) -> np.ndarray:
    """Return the trained arrays, or the buffers, as one vector in float64."""
    names = [name for name in arrays if (name in BUFFERS) == (kind == "buffers")]
    return np.concatenate([np.ravel(arrays[name]).astype(np.float64) for name in names])


ALIKE: list[Part] = [
    *(Bernoulli(), Markov(), Daily(), Probabilities(p={0: 3.0}), Clock(step={0: 1.0})),
    *(Clock(step=1.0, spread=1.0, jitter=1.0, dropout=0.1, per_device=3), Exponential()),
]


# ---- uploads ------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize(
    "part", [Median(), TrimmedMean(), GeometricMedian(), Krum(), MultiKrum()], ids=str
)
def test_one_upload_moves_a_combined_model_only_as_far_as_honest_ones_are(
    part: Combine, dtype: Any
) -> None:
    """Numbers of a buffer are within those of honest clients; so is the model, up to a factor.

    With a = 1/7 the geometric median is within 2 (1 - a)/(1 - 2 a) = 2.4 honest radii.
    """
    values = extremes(dtype)
    kinds = ("trained", "buffers", "all")

    def attack(arrays: Arrays, server_round: int) -> Arrays:
        value, kind = values[(server_round - 1) // 3], kinds[server_round % 3]
        evil = {n: np.full_like(a, value if a.dtype.kind == "f" else 2**62)
                for n, a in arrays.items()}  # fmt: skip
        evil["running_var"] = abs(evil["running_var"])
        lies = {n for n in arrays if kind in ("all", "buffers" if n in BUFFERS else "trained")}
        plain = honest(arrays, HOSTILE)
        return {n: evil[n] if n in lies else plain[n] for n in arrays}

    federation = Federation(attack)

    def within(info: RoundInfo) -> None:
        federation.seen(info)
        model, uploads = federation.models[-1], federation.uploads.values()
        buffers = np.stack([whole(one, "buffers") for one in uploads])
        found = whole(model, "buffers")
        rounding = 1e-6 * np.abs(buffers).max(0)
        assert (found >= buffers.min(0) - rounding).all()
        assert (found <= buffers.max(0) + rounding).all()
        trained = np.stack([whole(one, "trained") for one in uploads])
        radius = max(np.linalg.norm(one - trained.mean(0)) for one in trained)
        assert np.linalg.norm(whole(model, "trained") - trained.mean(0)) <= 2.4 * radius

    federation.train(made(combine=part, callbacks=[within]), initial(dtype), 3 * len(values))


@pytest.mark.parametrize("far", [1e3, 1e30, 1e200])
def test_a_far_upload_does_not_end_the_geometric_medians_iteration(far: float) -> None:
    """Where it ends, the directions to all uploads add up to 0."""
    near = np.random.default_rng(3).normal(size=(8, 5))
    uploads = [*near, np.full(5, far)]
    v = GeometricMedian().combined(uploads)
    slope = sum((v - w) / (norm(v - w)) for w in uploads)
    assert np.linalg.norm(slope) < 1e-6


STEPS = [Momentum(), Adam(), Yogi(), Adagrad(), FedExP()]


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("step", STEPS, ids=str)
def test_after_any_upload_a_servers_state_is_finite_and_training_goes_on(
    step: ServerStep, dtype: Any
) -> None:
    for value in extremes(dtype):

        def attack(arrays: Arrays, server_round: int, value: float = value) -> Arrays:
            upload = honest(arrays, HOSTILE)
            return upload | ({"w": np.full_like(arrays["w"], value)} if server_round == 2 else {})

        federation = Federation(attack)
        strategy = made(server_step=step, callbacks=[federation.seen], buffers=None)
        federation.train(strategy, {"w": np.zeros(2, dtype), "v": np.zeros(2, dtype)}, 5)
        state = fields_of(strategy.parts["server-step"])
        assert all(np.isfinite(one).all() for one in state.values())
        last, before = federation.models[-1], federation.models[-2]
        assert (last["v"] != before["v"]).all()  # of the arrays that nobody attacked
        assert np.isfinite(last["w"]).all()


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize(
    ("step", "bound"),
    [
        (Adam(lr=1.0), 0.1 / math.sqrt(0.01 * (1 - 0.81 / 0.99))),
        (Adagrad(lr=1.0), 1.0),
    ],
    ids=str,
)
def test_an_adaptive_step_is_bounded_whatever_the_upload(
    step: ServerStep, bound: float, dtype: Any
) -> None:
    """|m| <= sqrt(v) (1 - b_1) / sqrt((1 - b_2) (1 - b_1^2/b_2)), by Cauchy's inequality."""
    values = extremes(dtype)
    federation = Federation(
        lambda arrays, n: {**honest(arrays, HOSTILE), "w": np.full_like(arrays["w"], values[n - 1])}
    )
    strategy = made(server_step=step, callbacks=[federation.seen])
    federation.train(strategy, {**initial(dtype), "w": np.full(2, 5.0, dtype)}, len(values))
    moved = np.diff([model["w"].astype(np.float64) for model in federation.models], axis=0)
    assert 0.0 < np.abs(moved).max() <= bound * (1 + 1e-6)


OTHERS: list[dict[str, Any]] = [
    {"download": BFloat16()},
    {"compression": QSGD()},
    {"clipping_norm": 1.0},
    {"clock": Clock(step=1.0), "pace": Buffered(size=3, concurrency=5)},
    {"clock": Clock(step=1.0, spread=1.0), "pace": Deadline(seconds=9.0, over_select=1.5)},
]


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("parts", OTHERS, ids=str)
def test_any_upload_ends_no_run(parts: dict[str, Any], dtype: Any) -> None:
    values = extremes(dtype)
    federation = Federation(
        lambda arrays, n: {
            name: np.abs(np.full_like(a, values[n % len(values)])) if a.dtype.kind == "f" else a
            for name, a in arrays.items()
        }
    )
    result = federation.train(
        made(**parts, callbacks=[federation.seen]), initial(dtype), len(values)
    )
    assert all(np.isfinite(array.numpy()).all() for array in result.arrays.values())


def test_a_penalty_takes_any_upload() -> None:
    values = extremes(np.float64)
    federation = Federation(
        lambda arrays, n: {**arrays, "w": np.full_like(arrays["w"], values[n - 1])}
    )
    strategy = FedSGD(
        regularizer=L1(), local={"lr": 0.1}, buffers=BUFFERS, fraction_evaluate=0.0,
        assume_algorithm=True,
    )  # fmt: skip
    federation.train(strategy, initial(np.float64), len(values))


REFUSED: dict[str, Attack] = {
    "nan": lambda arrays, n: {**arrays, "w": np.full_like(arrays["w"], np.nan)},
    "shape": lambda arrays, n: {**arrays, "w": np.zeros(9)},
    "error": lambda arrays, n: None,
}


@functools.cache
def without_the_hostile(part: type[Combine]) -> ArrayRecord:
    """Return the model after four rounds in which the hostile client of five is never asked."""
    hostile = node_ids(5)[HOSTILE]
    without = made(
        combine=part(attackers=0),
        selection=lambda round: [client for client in round.connected if client != hostile],
    )
    return Federation(REFUSED["error"], clients=5).train(without, initial(np.float64), 4).arrays


@pytest.mark.parametrize("part", [Krum(attackers=1), MultiKrum(attackers=1)], ids=str)
@pytest.mark.parametrize("kind", REFUSED)
def test_a_rejected_reply_counts_as_one_of_the_attackers(part: Combine, kind: str) -> None:
    federation = Federation(REFUSED[kind], clients=5)
    result = federation.train(made(combine=part), initial(np.float64), 4)
    assert result.skipped == []
    alone = without_the_hostile(type(part))
    for name, array in result.arrays.items():
        np.testing.assert_array_equal(array.numpy(), alone[name].numpy())


def test_rejected_replies_lower_what_a_part_needs_and_not_what_the_user_wants() -> None:
    strategy = made(combine=Krum(attackers=2))
    assert [strategy.replies_needed(Round(rejected=n)) for n in range(4)] == [7, 5, 3, 3]
    assert made(combine=Krum(), min_replies=6).replies_needed(Round(rejected=1)) == 6


# ---- clients ------------------------------------------------------------------------------------


@pytest.mark.parametrize("part", ALIKE, ids=str)
def test_a_client_of_any_id_takes_part(part: Part) -> None:
    """The ids here are those of nodes, of 64 bits, which no table of a part names."""
    federation = Federation(lambda arrays, n: honest(arrays, HOSTILE))
    federation.train(made(**{part.stage: part}), initial(np.float32), 3)


SIZES = {
    "some unknown": ({1: 30, 2: 10}, [20, 30, 10]),
    "some of none": ({1: 0, 2: 10}, [5, 0, 10]),
    "all unknown": ({}, [1, 1, 1]),
    "all of none": ({0: 0, 1: 0, 2: 0}, [1, 1, 1]),
}


@pytest.mark.parametrize("kind", SIZES)
def test_by_size_draws_whatever_is_known_of_sizes(kind: str) -> None:
    samples, weights = SIZES[kind]
    round = Round(connected=(0, 1, 2), samples=samples, acked={0: 1}, seed=5)
    drawn = np.bincount(BySize().select(round, 3000), minlength=3)
    expected = 3000 * np.array(weights) / sum(weights)
    assert (np.abs(drawn - expected) <= 4 * np.sqrt(expected)).all()
    if not any(samples.values()):
        with pytest.raises(ValueError, match="3 of 3 clients were introduced without one"):
            BySize().select(replace(round, acked={}), 3)


def test_sizes_above_max_samples_are_not_believed() -> None:
    strategy = made(selection=BySize(), max_samples=100, fraction_train=1.0)
    round = Round(connected=(0, 1), acked={0: 1})
    chosen = selected(strategy, None, {}, round, {0: 10**9, 1: 100})
    assert dict(chosen.samples) == {1: 100}


def test_a_client_that_a_clocks_table_lacks_has_the_mean_of_the_others() -> None:
    clock = Clock(step={0: 1.0, 1: 3.0})
    assert [clock.seconds(0, 1, client, 1.0) for client in (0, 1, 2**63)] == [1.0, 3.0, 2.0]
    with pytest.raises(ValueError, match="step must be"):
        Clock(step={})


# ---- numbers ------------------------------------------------------------------------------------


@pytest.mark.parametrize("part", PARTS.values())
def test_an_extreme_number_is_refused_by_its_name_or_runs(part: type[Part]) -> None:
    for name, declaration in part.declarations.items():
        if declaration.kind not in (float, int):
            continue
        values = (0, 5e-324, 1e-9, 1e308, -1e308, 2**62)
        for number in values if declaration.kind is float else {int(value) for value in values}:
            if text := fault_of(part, **{name: number}):
                assert name in text
                assert len(text) < 300


def fault_of(part: type[Part], **numbers: float) -> str:
    """Return why a part, or a run with it, is refused; "" if it runs."""
    try:
        run_with(part(**numbers))
    except ValueError as error:
        return str(error)
    return ""


def run_with(part: Part) -> None:
    """Run two rounds with a part, and what it needs."""
    options: dict[str, Any] = {part.stage: part}
    if part.stage == "pace":
        options["clock"] = Clock(step=1.0)
    if part.stage == "regularizer":
        options |= {"local": {"lr": 0.1}, "assume_algorithm": True}
    if part.stage == "privacy":
        options |= {"weights": "uniform", "buffers": None}
    strategy = {"regularizer": FedSGD}.get(part.stage, FedAvg)(
        fraction_evaluate=0.0, quiet=True, **options
    )
    if isinstance(part, BySize):
        strategy.nodes.samples = dict.fromkeys(node_ids(5), 3)
    federation = Federation(lambda arrays, n: honest(arrays, HOSTILE), clients=5)
    federation.train(strategy, {"w": np.ones(3)}, 2)


@pytest.mark.parametrize(
    "text",
    [
        *("clock step={}", "trace file={}", "{}", "clock {}=1", "clock step=1 {}=1"),
        *("topk share={}", "probabilities p=0:{}", "buffered staleness={}"),
    ],
)
@pytest.mark.parametrize("length", [300, 200_000])
def test_an_error_of_a_part_is_short_whatever_it_is_given(text: str, length: int) -> None:
    with pytest.raises(ValueError) as caught:  # noqa: PT011  # its length
        run_with(parse_part(text.format("x" * length)))
    assert len(str(caught.value)) < 500


@pytest.mark.parametrize("path", ["/dev/zero", "/", "a\0b", "/dev/null", "/no/such"])
@pytest.mark.parametrize("text", ["clock step={}", "trace file={}"])
def test_a_file_of_devices_is_a_regular_one(text: str, path: str) -> None:
    part = parse_part(text.format(path))
    with pytest.raises(ValueError, match=text.partition("=")[0]):
        run_with(part)


@pytest.mark.parametrize("line", ["nan", "inf", "-1", "1,0", "1,1e-300", "1e308", "1,1,1,1", ""])
def test_a_line_of_a_clocks_file_is_within_its_bounds(line: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_text(f"1\n{line}\n")
    federation = Federation(lambda arrays, n: honest(arrays, HOSTILE))
    with pytest.raises(ValueError, match=r"clock step: .* is not a file of numbers"):
        federation.train(made(clock=Clock(step=str(tmp_path / "file"))), initial(np.float32), 1)
    assert federation.uploads == {}  # before any work
