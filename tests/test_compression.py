"""Laws of compressed uploads: what codes hold, and that what they leave out comes later."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from federations import Troubled
from flwr.app import ArrayRecord, Message
from laws import START, TABLE, Row, local, one_of_each_mechanism, train
from problems import CLIENT_OF, DIM, grid, quadratics, to_record
from torch import nn

import clients.base
from clients import AnyAlgorithmClient, InProcessGrid, Problem, client_app
from clients.compressing import compressed
from fl_strategies import SCAFFOLD, FedADMM, FedAvg, FederatedStrategy
from fl_strategies.core.layout import Layout
from fl_strategies.messages.codes import decompressed
from fl_strategies.messages.encoding import encoded
from fl_strategies.parts import QSGD, BFloat16, Compression, TopK, parts_for
from simulations.experiment import metrics_of

CODECS: list[Compression] = [TopK(share=0.4), BFloat16(), QSGD(levels=100)]
every_codec = pytest.mark.parametrize("codec", CODECS, ids=str)
FEEDBACK = [codec for codec in CODECS if codec.feedback]
TYPES = [np.dtype(np.float32), np.dtype(np.float64)]
every_type = pytest.mark.parametrize("dtype", TYPES, ids=str)
ROW = {row.name: row for row in TABLE}


def vector(size: int, dtype: Any = np.float64, seed: int = 0) -> np.ndarray:
    rng = np.random.default_rng(seed)
    return (rng.normal(size=size) * np.exp(2 * rng.normal(size=size))).astype(dtype)


def through(codec: Compression, p: np.ndarray, seed: int = 0) -> np.ndarray:
    return codec.decode(codec.encode(p, np.random.default_rng(seed)), p.size, p.dtype)


def test_no_codec_is_missing_here() -> None:
    assert {*map(type, CODECS)} == {*parts_for("compression").values()}


# ---- codecs -------------------------------------------------------------------------------------


@every_type
@pytest.mark.parametrize("size", [1, 2, 7, 1000])
def test_a_code_has_the_stated_bytes_and_a_fixed_point(size: int, dtype: np.dtype[Any]) -> None:
    b = dtype.itemsize
    sizes: dict[Compression, int] = {
        TopK(share=0.01): -(-size // 100) * (4 + b),
        TopK(share=1.0): size * (4 + b),
        BFloat16(): 2 * size,
        QSGD(levels=1): b + -(-size * 2 // 8),
        QSGD(levels=127): b + size,
        QSGD(levels=2**15 - 1): b + 2 * size,
    }
    p = vector(size, dtype)
    for codec, expected in sizes.items():
        assert codec.encode(p, np.random.default_rng(0)).nbytes == expected
        zero = through(codec, np.zeros(size, dtype))
        assert zero.dtype == dtype
        np.testing.assert_array_equal(zero, 0.0)
        if not isinstance(codec, QSGD):
            np.testing.assert_array_equal(through(codec, found := through(codec, p)), found)
    np.testing.assert_array_equal(through(TopK(share=1.0), p), p)


@every_type
@pytest.mark.parametrize("codec", FEEDBACK, ids=str)
def test_a_codec_with_feedback_is_a_contraction(codec: Compression, dtype: np.dtype[Any]) -> None:
    vectors = [vector(size, dtype, seed) for size in (1, 7, 1000) for seed in range(20)]
    for p in (*vectors, np.ones(100_000, dtype)):
        assert np.linalg.norm(through(codec, p) - p) < np.linalg.norm(p)


@pytest.mark.parametrize("codec", [codec for codec in CODECS if not codec.feedback], ids=str)
def test_a_codec_without_feedback_is_unbiased(codec: Compression) -> None:
    """The mean of N draws is off by 1 / sqrt(N) of their spread."""
    p, draws = vector(50), 2000
    found = np.array([through(codec, p, seed) for seed in range(draws)])
    off, spread = np.linalg.norm(found.mean(0) - p), np.linalg.norm(found.std(0))
    assert off <= 2 * spread / np.sqrt(draws) + 1e-12


def test_qsgd_keeps_small_numbers_of_a_small_type() -> None:
    p = np.full(4, 3e-5, np.float16)  # whose squares are 0 in float16
    np.testing.assert_allclose(through(QSGD(), p), p, rtol=0.01)


def test_top_k_sends_so_many() -> None:
    """0.07 x 100 is 7.000000000000001 in floating point."""
    assert [TopK(share=share).count(100) for share in (0.07, 0.071, 0.55)] == [7, 8, 55]


@every_type
@pytest.mark.parametrize("share", [0.001, 0.01, 0.3, 1.0])
def test_top_k_is_a_contraction(share: float, dtype: np.dtype[Any]) -> None:
    for seed in range(20):
        p = vector(1000, dtype, seed)
        left = float(np.sum((p - through(TopK(share=share), p)).astype(float) ** 2))
        k = np.ceil(share * p.size)
        assert left <= (1 - k / p.size) * float(np.sum(p.astype(float) ** 2)) * (1 + 1e-6)


@every_type
def test_bfloat16_rounds_to_the_nearest(dtype: np.dtype[Any]) -> None:
    p = vector(10_000, dtype)
    found = through(BFloat16(), p)
    assert (np.abs(found - p) <= 2.0**-8 * np.abs(p)).all()
    import torch

    there = torch.from_numpy(p.astype(np.float32)).to(torch.bfloat16).float().numpy()
    np.testing.assert_array_equal(found, there.astype(dtype))


@pytest.mark.parametrize("levels", [1, 5, 127])
def test_qsgd_is_unbiased(levels: int) -> None:
    """The mean of N draws of each number is within its error: chi-square over all numbers."""
    draws, p, codec, rng = 4000, vector(50), QSGD(levels=levels), np.random.default_rng(0)
    found = np.array([codec.decode(codec.encode(p, rng), p.size, p.dtype) for _ in range(draws)])
    step = np.linalg.norm(p) / levels
    share = (p / step) % 1.0
    variance = share * (1 - share) * step**2
    random = share * (1 - share) > 0.05
    z2 = (found.mean(0) - p)[random] ** 2 / (variance[random] / draws)
    assert z2.sum() < random.sum() + 5 * np.sqrt(2 * random.sum())
    np.testing.assert_allclose(found.var(0)[random], variance[random], rtol=0.25)


@every_type
@every_codec
def test_a_broken_code_is_an_error_and_never_a_crash(
    codec: Compression, dtype: np.dtype[Any]
) -> None:
    rng, p = np.random.default_rng(1), vector(20, dtype)
    code = codec.encode(p, rng)
    for size in (0, 1, code.size - 1, code.size + 1):
        with pytest.raises(ValueError, match=f"{size} bytes"):
            codec.decode(np.resize(code, size), p.size, dtype)
    for _ in range(300):
        broken = code.copy()
        broken[rng.integers(code.size, size=3)] = rng.integers(256, size=3)
        try:
            assert codec.decode(broken, p.size, dtype).shape == p.shape
        except ValueError as error:
            assert "it has" in str(error) or "ascend" in str(error)  # noqa: PT017


def test_a_code_that_names_a_place_twice_is_refused() -> None:
    codec, p = TopK(share=0.5), vector(4)
    code = codec.encode(p, np.random.default_rng(0))
    code[4:8] = code[:4]
    with pytest.raises(ValueError, match="do not ascend"):
        codec.decode(code, p.size, p.dtype)


# ---- what is left out comes later ---------------------------------------------------------------


@pytest.mark.parametrize("codec", FEEDBACK, ids=str)
@pytest.mark.parametrize("kind", [FedAvg, FedADMM, SCAFFOLD])
def test_what_was_sent_and_used_and_what_is_left_is_all_that_changed(
    kind: Any, codec: Compression, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Replies get lost, come late, and rounds are skipped: the sums agree for each client."""
    book: dict[int, dict[int, Any]] = defaultdict(dict)
    now: dict[str, int] = {}

    def noted(codec: Any, model: Any, changes: Any, memory: Any, rng: Any) -> Any:
        arrays, left = compressed(codec, model, changes, memory, rng)
        size = model.vector.numel()
        codes = [a for a in arrays if a.dtype == np.uint8 and a.size]
        sent = np.stack([codec.decode(code, size, np.dtype(float)) for code in codes])
        true = np.stack([change.numpy() for change in changes])
        book[now["client"]][now["round"]] = true, sent, left
        return arrays, left

    monkeypatch.setattr(clients.base, "compressed", noted)
    used: dict[int, list[int]] = defaultdict(list)
    rng = np.random.default_rng(2)
    bad = {(t, c) for t in range(1, 16) for c in range(4) if rng.random() < 0.3}
    late = {(t, c) for t in range(1, 16) for c in range(4) if rng.random() < 0.15}

    class Noted(Troubled):
        def answer(self, message: Message) -> Message | None:
            now["client"] = CLIENT_OF[message.metadata.dst_node_id]
            config = message.content.config_records.get("config", {})
            now["round"] = int(str(config.get("server-round", 0)))
            return super().answer(message)

    on = Noted(lost=lambda t, c: (t, c) in bad, late=lambda t, c: (t, c) in late)

    def ended(info: Any) -> None:
        on.now += 1
        for client, number in strategy.ledger.acked.items():
            if number not in used[client]:
                used[client].append(number)

    strategy = kind(
        compression=codec,
        local=local(),
        fraction_evaluate=0.0,
        min_replies=2,  # so that rounds are skipped
        max_unusable_rounds=15,
        callbacks=[ended],
    )
    strategy.start(on, to_record(START), 15)
    assert strategy.result.skipped
    for client, rounds in used.items():
        rows = [book[client][number] for number in rounds]
        true, sent = (sum(row[place] for row in rows) for place in (0, 1))
        np.testing.assert_allclose(sent + rows[-1][2], true, rtol=1e-12, atol=1e-12)
        assert len(rounds) < 15


# ---- around any algorithm -----------------------------------------------------------------------


def made(row: Row, codec: Compression | None, **options: Any) -> FederatedStrategy:
    return row.strategy(**{"local": local(), "compression": codec, **options})


def goes(row: Row) -> bool:
    return not TopK().refusal(row.strategy(local=local()), row.name)


@one_of_each_mechanism
def test_any_algorithm_trains_with_codes_or_says_why_not(row: Row) -> None:
    """With a code so fine that the limit is the algorithm's own."""
    adds_up = row.strategy(local=local()).accumulates_changes
    for fine in (QSGD(levels=2**15 - 1), BFloat16()):
        if not goes(row) or (adds_up and not fine.feedback):
            with pytest.raises(ValueError, match=r"does not go with .*(whole model|drift apart)"):
                made(row, fine)
            continue
        plain, coded = (train(made(row, codec), grid(quadratics(3)), 4) for codec in (None, fine))
        np.testing.assert_allclose(coded, plain, rtol=1e-2, atol=1e-2)
        assert not np.array_equal(coded, plain)


class Scaled(nn.Module):
    """With a parameter of no dimension, as a temperature is."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.scale = nn.Linear(2, 1).double(), nn.Parameter(torch.tensor(2.0).double())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.scale * self.linear(x)


@pytest.mark.parametrize(
    ("strategy", "options"),
    [
        *((FedAvg, {"compression": codec}) for codec in CODECS),
        *((FedADMM, {"compression": codec}) for codec in FEEDBACK),
        *((strategy, {"download": BFloat16()}) for strategy in (FedAvg, FedADMM)),
    ],
)
def test_a_parameter_of_no_dimension_travels_in_codes(strategy: Any, options: Any) -> None:
    x = torch.eye(2).double()

    def client_fn(context: Any) -> AnyAlgorithmClient:
        return AnyAlgorithmClient(Problem(Scaled(), nn.functional.mse_loss, x, x[:, :1]))

    running = strategy(fraction_evaluate=0.0, **options)
    arrays = running.start(
        InProcessGrid(client_app(client_fn), 2), ArrayRecord(Scaled().state_dict()), 2
    ).arrays
    assert running.run.faults == {}
    assert arrays["scale"].numpy().shape == ()


@every_codec
def test_a_round_counts_the_bytes_of_codes(codec: Compression) -> None:
    name, vectors = ("scaffold", 2) if codec.feedback else ("fedavg", 1)
    strategy = made(ROW[name], codec)
    train(strategy, grid(quadratics(3)), 2)
    up = strategy.result.train_metrics_clientapp[2]["bytes-up"]
    codes = 3 * vectors * codec.encode(np.zeros(DIM), np.random.default_rng(0)).nbytes
    assert codes < up <= codes + 3 * 4 * 128  # headers of four arrays a client, at most


def test_a_model_is_start_and_its_code_and_an_extra_vector_its_code_alone() -> None:
    start = {name: array.numpy() for name, array in to_record(START).items()}
    layout, codec = Layout.of(start), TopK(share=1.0)
    change, extra = vector(DIM), vector(DIM, seed=1)
    empty = {name: np.zeros(0, np.uint8) for name in layout.trainable[1:]}
    sent = {}
    for prefix, p in (("", change), ("c/", extra)):
        code = codec.encode(p, np.random.default_rng(0))
        sent |= {prefix + name: array for name, array in empty.items()}
        sent[prefix + layout.trainable[0]] = code
    got = decompressed(sent, layout, ("c",), codec.decode, start)
    model = np.concatenate([got[name].ravel() for name in layout.trainable])
    added = np.concatenate([got[f"c/{name}"].ravel() for name in layout.trainable])
    np.testing.assert_allclose(model, change + layout.pack(start))
    np.testing.assert_allclose(added, extra)


# ---- hostile and foreign replies ----------------------------------------------------------------


def replaced(make: Callable[[dict[str, Any]], dict[str, Any]]) -> Any:
    """Return a fault that changes client 1's arrays."""

    def fault(request: Message, reply: Message) -> Message:
        if CLIENT_OF[request.metadata.dst_node_id] == 1 and reply.has_content():
            for key, record in reply.content.array_records.items():
                reply.content[key] = ArrayRecord(make(dict(record)))
        return reply

    return fault


BROKEN: dict[str, tuple[Callable[[dict[str, Any]], dict[str, Any]], str]] = {
    "a short code": (lambda a: a | {"head": encoded(np.zeros(3, np.uint8))}, "3 bytes"),
    "floats": (lambda a: a | {"head": encoded(np.zeros(24))}, "is not a code"),
    "two dimensions": (lambda a: a | {"head": encoded(np.zeros((2, 12), np.uint8))}, "not a code"),
    "no code": (lambda a: {"tail": a["tail"]}, "is not a code"),
    "more than a code": (lambda a: a | {"tail": encoded(np.zeros(1))}, "are not empty"),
    "not finite": (
        lambda a: a | {"head": encoded(TopK(share=0.4).encode(np.full(5, np.inf), None))},  # type: ignore[arg-type]
        "not finite",
    ),
}


@pytest.mark.parametrize("kind", BROKEN)
def test_a_broken_code_costs_its_client_alone(kind: str) -> None:
    make, why = BROKEN[kind]
    strategy = FedAvg(compression=TopK(share=0.4), local=local(), fraction_evaluate=0.0)
    strategy.start(grid(quadratics(3), fault=replaced(make)), to_record(START), 2)
    assert strategy.result.train_metrics_clientapp[2]["clients-used"] == 2
    assert why in strategy.run.faults[1] or "changed" in strategy.run.faults[1]


def test_a_client_that_sends_no_codes_is_used_as_it_is() -> None:
    """A foreign client among ours; it sends what it was asked for by Flower's FedAvg."""

    def foreign(request: Message, reply: Message) -> Message:
        trained = request.metadata.message_type == "train"
        if CLIENT_OF[request.metadata.dst_node_id] == 1 and trained:
            reply.content["arrays"] = to_record(START)
            reply.content["config"].pop("compression", None)
            reply.content["config"].pop("checksums", None)
        return reply

    strategy = FedAvg(compression=TopK(share=0.4), local=local(), fraction_evaluate=0.0)
    strategy.start(grid(quadratics(3), fault=foreign), to_record(START), 2)
    assert strategy.result.train_metrics_clientapp[2]["clients-used"] == 3


def test_codes_and_means_of_hosts_exclude_each_other() -> None:
    with pytest.raises(ValueError, match='fold must be "auto" or "off"'):
        FedAvg(compression=TopK(), fold="on")


@pytest.mark.slow
@pytest.mark.parametrize("stack", ["off", "auto"])
def test_one_percent_of_the_numbers_trains_a_network(stack: str) -> None:
    """The accuracy of FedAvg, with less than a twentieth of its bytes."""
    keys: dict[str, Any] = {"algorithm": "fedavg", "dataset": "digits", "model": "mlp"}
    keys |= {"clients": 10, "fraction": 1.0, "rounds": 40, "partition": "shards", "stack": stack}
    accuracy, sent = [], []
    for compression in ("", "topk share=0.01"):
        rows = metrics_of(**keys, compression=compression)
        accuracy.append(max(row["test-accuracy"] for row in rows))
        sent.append(sum(row["bytes-up"] for row in rows))
    print(accuracy, sent)
    assert accuracy[1] > accuracy[0] - 0.02
    assert sent[1] < sent[0] / 20
