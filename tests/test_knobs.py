"""Laws of the small parts: schedules, streams, means, callbacks, layout, and the wire."""

from __future__ import annotations

import io
import json
import math
import pickle
import struct
from itertools import permutations
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import Array
from hypothesis import given, settings
from hypothesis import strategies as st
from problems import to_record, to_vector
from safetensors.numpy import load_file

from fl_strategies import BestModel, EarlyStop, History, RoundInfo, step_decay
from fl_strategies.core.layout import BufferMean, Layout
from fl_strategies.core.randomness import stream
from fl_strategies.core.records import BadReply
from fl_strategies.core.schedules import at, check
from fl_strategies.core.subproblem import Subproblem
from fl_strategies.core.vectors import weighted_mean
from fl_strategies.server.wire import check_scalars, decode, decode_model

# ---- schedules ----------------------------------------------------------------------------------


def test_a_schedule_holds_from_each_first_round_on() -> None:
    schedule = {7: 0.3, 0: 2.0, 4: 1.1}  # in any order
    values = [2.0] * 4 + [1.1] * 3 + [0.3] * 5
    assert [at(schedule, t) for t in range(12)] == values
    assert {at(0.4, t) for t in range(12)} == {0.4}


def test_rates_fall_tenfold_at_half_and_at_three_quarters() -> None:
    for rounds in (1, 2, 3, 4, 5, 8, 100, 1000):
        schedule = step_decay(0.6, rounds)
        for t in range(1, rounds + 1):
            done = (t - 1) / rounds  # share of the rounds before this one
            expected = 0.6 / (100 if done >= 0.75 else 10 if done >= 0.5 else 1)
            assert at(schedule, t) == expected
    with pytest.raises(ValueError, match="rounds must be >= 1, got 0"):
        step_decay(0.6, 0)


@pytest.mark.parametrize(
    ("knob", "bounds", "message"),
    [
        (0.0, {"above": 0.0}, r"rho must be > 0, got 0\.0"),
        (-0.1, {"low": 0.0}, r"rho must be >= 0, got -0\.1"),
        (2.5, {"above": 0.0, "high": 2.0}, r"rho must be > 0 and <= 2, got 2\.5"),
        (math.nan, {}, "rho must be finite, got nan"),
        (math.inf, {"above": 0.0}, "rho must be > 0, got inf"),
        (True, {}, "rho must be finite, got True"),
        ("1", {}, "rho must be finite, got '1'"),
        (1.0, {"low": 0.0, "below": 1.0}, r"rho must be >= 0 and < 1, got 1\.0"),
        ({0: 1.0, 5: -1.0}, {"low": 0.0}, r"rho must be >= 0, got -1\.0"),
        ({1: 1.0}, {}, r"rho: a schedule starts at round 0, got rounds \[1\]"),
        ({0: 1.0, -1: 1.0}, {}, r"got rounds \[-1, 0\]"),
        ({}, {}, r"got rounds \[\]"),
    ],
)
def test_a_knob_outside_its_range_is_named_with_bound_and_value(
    knob: Any, bounds: dict[str, float], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        check("rho", knob, scheduled=True, **bounds)


def test_a_knob_on_its_closed_bounds_passes() -> None:
    for knob in (0, 2, 0.5, {0: 0.0, 3: 2.0}, np.float64(1.0)):
        check("rho", knob, low=0.0, high=2.0, scheduled=True)


# ---- random streams -----------------------------------------------------------------------------


def test_a_stream_depends_on_seed_purpose_and_indices_and_on_nothing_else() -> None:
    keys = [
        (s, p, t, c) for s in (0, 1) for p in ("sample", "local") for t in (1, 2) for c in (1, 2)
    ]
    first = {key: stream(*key).random(4).tolist() for key in keys}
    np.random.seed(1)  # noqa: NPY002
    again = {key: stream(*key).random(4).tolist() for key in reversed(keys)}
    assert first == again
    assert len({tuple(numbers) for numbers in first.values()}) == len(keys)


def test_node_ids_of_64_bits_have_streams_of_their_own() -> None:
    drawn = {stream(1, "local", 1, node).random() for node in (5, 2**32 + 5, 2**63 + 5)}
    assert len(drawn) == 3


def test_streams_have_no_negative_indices() -> None:
    for arguments in ((-1, "sample"), (1, "sample", 3, -2)):
        with pytest.raises(ValueError, match=r"seed and indices must be >= 0, got \(.*-"):
            stream(*arguments)


# ---- the subproblem and means -------------------------------------------------------------------


def test_the_subproblems_gradient_is_the_derivative_of_its_value() -> None:
    rng = np.random.default_rng(1)
    A, b, a, c, w = rng.normal(size=(4, 4)), *rng.normal(size=(4, 4))
    A = A @ A.T
    r = 0.7
    W = torch.tensor(w, requires_grad=True)
    tA, tb, ta, tc = map(torch.tensor, (A, b, a, c))
    value = 0.5 * (W - tb) @ tA @ (W - tb) + ta @ W + r / 2 * ((W - tc) ** 2).sum()
    value.backward()
    got = Subproblem(a, r, c).gradient(w, A @ (w - b))
    np.testing.assert_allclose(got, W.grad, rtol=1e-12)


@pytest.mark.parametrize("kind", [np.asarray, torch.tensor])
def test_a_weighted_mean_is_the_matrix_product_with_the_shares(kind: Any) -> None:
    rng = np.random.default_rng(2)
    vectors, weights = rng.normal(size=(5, 3)), rng.uniform(0.1, 9.0, 5)
    pairs = [(kind(v), float(p)) for v, p in zip(vectors, weights, strict=True)]
    before = vectors.copy()
    got = weighted_mean(iter(pairs))
    np.testing.assert_allclose(got, weights @ vectors / weights.sum(), rtol=1e-13)
    np.testing.assert_array_equal([np.asarray(v) for v, _ in pairs], before)
    np.testing.assert_allclose(weighted_mean(iter(pairs[::-1])), got, rtol=1e-13)


def test_a_mean_of_no_vectors_is_refused() -> None:
    for pairs in ([], [(np.ones(3), 0.0)]):
        with pytest.raises(ValueError, match="at least one vector with a positive weight"):
            weighted_mean(pairs)


# ---- callbacks ----------------------------------------------------------------------------------


def rounds(values: list[float], metric: str = "test-accuracy") -> list[RoundInfo]:
    """A run whose model in round t is t everywhere."""
    return [
        RoundInfo(t, len(values), to_record(np.full(5, float(t))), {metric: value, "seconds": 0.5})
        for t, value in enumerate(values, start=1)
    ]


def test_history_is_on_disk_line_by_line(tmp_path: Path) -> None:
    path = tmp_path / "history.jsonl"
    path.write_text("of an earlier run\n")
    history = History(path)
    values = [0.25, 0.5, 0.125]
    for t, info in enumerate(rounds(values), start=1):
        assert history(info) is None
        lines = path.read_text().splitlines()
        assert [json.loads(line) for line in lines] == [
            {"round": i, "test-accuracy": value, "seconds": 0.5}
            for i, value in enumerate(values[:t], start=1)
        ]


@pytest.mark.parametrize(
    ("values", "smaller", "best_round"),
    [
        ([0.2, 0.7, 0.7, 0.3], False, 2),  # the first of equals
        ([0.2, 0.7, 0.1, 0.3], True, 3),
        ([-3.0, -2.0], False, 2),
        ([math.nan, 0.1, math.nan, 0.4, 0.2], False, 4),
        ([math.nan, 0.1, math.nan], True, 2),
    ],
)
def test_the_best_rounds_model_is_on_disk(
    tmp_path: Path, values: list[float], smaller: bool, best_round: int
) -> None:
    best = BestModel(tmp_path / "best.safetensors", smaller=smaller)
    for info in rounds(values):
        assert best(info) is None
    assert (best.best_round, best.best) == (best_round, values[best_round - 1])
    kept = load_file(tmp_path / "best.safetensors")
    np.testing.assert_array_equal(to_vector([kept["head"], kept["tail"]]), np.full(5, best_round))
    assert [path.name for path in tmp_path.iterdir()] == ["best.safetensors"]


@pytest.mark.parametrize(
    ("values", "settings", "stops"),
    [
        ([0.1, 0.5, 0.9, 0.2], {"target": 0.9}, 3),
        ([0.1, 0.5, 0.8, 0.2], {"target": 0.9}, None),
        ([3.0, 2.0, 1.0], {"target": 2.0, "smaller": True}, 2),
        ([0.1, 0.3, 0.2, 0.3, 0.4], {"patience": 2}, 4),  # an equal is no improvement
        ([0.1, 0.3, 0.2, 0.4, 0.3, 0.1], {"patience": 2}, 6),
        ([3.0, 2.0, 2.5], {"patience": 1, "smaller": True}, 3),
        ([math.nan, math.nan, 0.3], {"patience": 2}, 2),
        ([0.1, 0.3, 0.2, 0.1], {"patience": 3, "target": 0.3}, 2),
    ],
)
def test_training_stops_at_the_target_or_out_of_patience(
    values: list[float], settings: dict[str, Any], stops: int | None
) -> None:
    stop = EarlyStop(**settings)
    said = [stop(info) for info in rounds(values)]
    expected = None if True not in said else said.index(True) + 1
    assert expected == stops


def test_a_stop_without_a_reason_is_refused() -> None:
    with pytest.raises(ValueError, match="needs a target, a patience, or both"):
        EarlyStop()
    with pytest.raises(ValueError, match="patience must be >= 1, got 0"):
        EarlyStop(patience=0)


def test_a_metric_that_is_not_there_is_an_error(tmp_path: Path) -> None:
    (info,) = rounds([0.5], metric="eval-loss")
    for callback in (BestModel(tmp_path / "best"), EarlyStop(target=1.0)):
        with pytest.raises(KeyError, match="test-accuracy"):
            callback(info)


# ---- layout -------------------------------------------------------------------------------------


def model(seed: int = 0) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    return {
        "conv": rng.normal(size=(2, 3, 1, 2)).astype(np.float32),
        "mean": rng.normal(size=3).astype(np.float32),
        "bias": rng.normal(size=()).astype(np.float32),
        "count": np.asarray(rng.integers(1, 9)),
        "fc": rng.normal(size=(2, 4)).astype(np.float32),
    }


BUFFERS = ("mean", "count")


def test_pack_and_unpack_are_inverse() -> None:
    arrays = model()
    layout = Layout.of(arrays, BUFFERS)
    assert layout.trainable == ["conv", "bias", "fc"]
    vector = layout.pack(arrays)
    assert vector.shape == (12 + 1 + 8,)
    assert vector.dtype == np.float64
    other = model(1)
    back = layout.unpack(vector.astype(np.float64), other)
    assert list(back) == list(arrays)
    for name, array in back.items():
        np.testing.assert_array_equal(array, (other if name in BUFFERS else arrays)[name])
        assert array.dtype == arrays[name].dtype
        assert array.shape == arrays[name].shape
    np.testing.assert_array_equal(layout.pack(back), vector)


def test_packing_a_model_copies_its_arrays() -> None:
    arrays = {"only": np.ones(4)}
    layout = Layout.of(arrays)
    layout.pack(arrays)[:] = 0.0
    np.testing.assert_array_equal(arrays["only"], np.ones(4))


def test_a_signature_tells_names_shapes_types_and_buffers_apart() -> None:
    arrays = model()
    layouts = [
        Layout.of(arrays, BUFFERS),
        Layout.of(arrays, (*BUFFERS, "bias")),
        Layout.of(arrays | {"fc": arrays["fc"].T}, BUFFERS),
        Layout.of(arrays | {"fc": arrays["fc"].astype(np.float64)}, BUFFERS),
        Layout.of({n + "_": a for n, a in arrays.items()}, ("mean_", "count_")),
        Layout.of(dict(reversed(arrays.items())), BUFFERS),
    ]
    assert len({layout.signature for layout in layouts}) == len(layouts)
    assert Layout.of(model(1), BUFFERS).signature == layouts[0].signature


@pytest.mark.parametrize(
    ("arrays", "buffers", "message"),
    [
        ({"n": np.arange(3)}, (), "array 'n' has type int64: only floating-point"),
        ({"w": np.ones(2), "n": np.arange(3)}, ("m",), r"buffers \['m'\] are not among"),
        ({"w": np.ones(2)}, ("w",), "no trainable array"),
        ({}, (), "no trainable array"),
        ({"w": np.array([1.0, np.inf])}, (), "array 'w' of the initial model is not finite"),
    ],
)
def test_a_model_that_cannot_be_trained_is_refused(
    arrays: dict[str, np.ndarray], buffers: tuple[str, ...], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        Layout.of(arrays, buffers)


def test_buffers_merge_by_examples_and_by_maximum_in_any_order() -> None:
    rng = np.random.default_rng(3)
    sizes = [3, 50, 11]
    clients = [
        {
            "mean": rng.normal(5.0, 2.0, 4).astype(np.float32),
            "scale": np.asarray(rng.normal(), np.float64),
            "count": np.asarray(rng.integers(100)),
            "seen": rng.random(3) < 0.5,
        }
        for _ in sizes
    ]
    before = [{name: array.copy() for name, array in client.items()} for client in clients]
    for order in permutations(range(3)):
        merged = BufferMean()
        for i in order:
            merged.add(clients[i], sizes[i])
        value = merged.value()
        for name, tolerance in (("mean", 4 * np.finfo(np.float32).eps), ("scale", 1e-14)):
            wide = np.array([client[name] for client in clients], np.float64)
            expected = np.tensordot(np.array(sizes) / sum(sizes), wide, 1)
            largest = np.abs(wide).max()
            np.testing.assert_allclose(value[name], expected, rtol=0, atol=tolerance * largest)
        assert value["count"] == max(int(client["count"]) for client in clients)
        np.testing.assert_array_equal(value["seen"], np.any([c["seen"] for c in clients], 0))
        for name, array in value.items():
            assert isinstance(array, np.ndarray)  # what Flower's Array takes, also without axes
            assert (array.dtype, array.shape) == (clients[0][name].dtype, clients[0][name].shape)
    for client, untouched in zip(clients, before, strict=True):
        for name in client:
            np.testing.assert_array_equal(client[name], untouched[name])


# ---- the wire -----------------------------------------------------------------------------------


def wire(data: bytes) -> Array:
    return Array("float64", (2, 3), "numpy.ndarray", data)


def npy(array: np.ndarray, **options: Any) -> bytes:
    file = io.BytesIO()
    np.save(file, array, **options)
    return file.getvalue()


def headed(header: str, body: bytes = b"", version: bytes = b"\x01\x00") -> bytes:
    """A .npy file whose header says what it likes."""
    text = header.encode("latin1") + b"\n"
    length = struct.pack("<H" if version == b"\x01\x00" else "<I", len(text))
    return b"\x93NUMPY" + version + length + text + body


def claims(descr: str, shape: str, body: bytes = b"") -> bytes:
    return headed(f"{{'descr': {descr}, 'fortran_order': False, 'shape': {shape}}}", body)


GOOD = np.arange(6.0).reshape(2, 3) - 2.5


@pytest.mark.parametrize(
    "array",
    [
        GOOD,
        np.asfortranarray(GOOD),
        GOOD.astype(np.float32)[:, ::2],
        np.asarray(3.5),
        np.zeros((0, 3)),
        np.arange(4) > 2,
        np.arange(7, dtype=np.int8),
        np.zeros((1,) * 12),
    ],
)
def test_a_plain_array_is_decoded_in_any_memory_order(array: np.ndarray) -> None:
    for data in (npy(array, allow_pickle=False), bytes(Array(array).data)):
        got = decode(wire(data))
        np.testing.assert_array_equal(got, array)
        assert (got.dtype, got.shape) == (array.dtype, array.shape)
        assert not got.flags.writeable


class Bomb:
    """Goes off when unpickled."""

    def __reduce__(self) -> Any:
        return (pytest.fail, ("unpickled",))


def npz() -> bytes:
    file = io.BytesIO()
    np.savez(file, a=GOOD)
    return file.getvalue()


DATA = GOOD.tobytes()
HOSTILE = {
    "nothing": b"",
    "noise": bytes(range(256)),
    "pickle": pickle.dumps(Bomb()),
    "pickled objects": npy(np.array([Bomb()], dtype=object), allow_pickle=True),
    "objects by name": claims("'|O'", "(6,)", DATA),
    "objects in a record": claims("[('a', '|O'), ('b', '<f8')]", "(3,)", DATA),
    "npz": npz(),
    "magic only": b"\x93NUMPY",
    "no header": b"\x93NUMPY\x01\x00\xff\xff",
    "version 9": b"\x93NUMPY\x09\x00" + npy(GOOD)[8:],
    "one byte less": npy(GOOD)[:-1],
    "one byte more": npy(GOOD) + b"\0",
    "half": npy(GOOD)[: len(npy(GOOD)) // 2],
    "larger than it is": claims("'<f8'", "(2, 300)", DATA),
    "smaller than it is": claims("'<f8'", "(2, 2)", DATA),
    "huge": claims("'<f8'", "(10**30, 10**30)", DATA),
    "huge number": claims("'<f8'", f"({10**40},)", DATA),
    "endless number": claims("'<f8'", f"(0x{'f' * 3900},)", DATA),
    "negative": claims("'<f8'", "(-6,)", DATA),
    "twice negative": claims("'<f8'", "(-2, -3)", DATA),
    "negative one": claims("'<f8'", "(-1, -6)", DATA),
    "no integer": claims("'<f8'", "(6.0,)", DATA),
    "no tuple": claims("'<f8'", "6", DATA),
    "too many axes": claims("'<f8'", f"({'1, ' * 80}6)", DATA),
    "huge but nothing": claims("'|V0'", "(10000000000,)"),
    "arrays in arrays": claims("('<f8', (2,))", "(3,)", DATA),
    "no such type": claims("'<q9'", "(6,)", DATA),
    "code": headed("{'descr': __import__('os').abort(), 'fortran_order': False, 'shape': ()}"),
    "deep": headed("(" * 900),
    "long header": claims("'<f8'", f"(6,{' ' * 5000})", DATA),
    "header of a gigabyte": b"\x93NUMPY\x02\x00\xff\xff\xff\x3f" + DATA,
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_bytes_are_a_bad_reply_and_nothing_else(name: str) -> None:
    with pytest.raises(BadReply):
        decode(wire(HOSTILE[name]))


@settings(max_examples=150, deadline=None, derandomize=True, database=None)
@given(st.data())
def test_damaged_bytes_are_an_array_or_a_bad_reply(data: st.DataObject) -> None:
    whole = bytearray(npy(GOOD))
    for _ in range(data.draw(st.integers(1, 3))):
        place = data.draw(st.integers(0, len(whole) - 1))
        whole[place] = data.draw(st.integers(0, 255))
    try:
        got = decode(wire(bytes(whole)))
    except BadReply:
        return
    assert got.nbytes <= len(whole)


def record(**changes: np.ndarray | bytes | None) -> dict[str, Array]:
    arrays: dict[str, Any] = model() | changes
    return {
        name: wire(value) if isinstance(value, bytes) else Array(value)
        for name, value in arrays.items()
        if value is not None
    }


def test_a_reply_like_the_model_is_decoded() -> None:
    layout = Layout.of(model(), BUFFERS)
    for name, array in decode_model(record(), layout).items():
        np.testing.assert_array_equal(array, model()[name])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"fc": None}, r"missing \['fc'\], unexpected \[\]"),
        ({"fc2": np.ones(2)}, r"missing \[\], unexpected \['fc2'\]"),
        ({"fc": np.ones((4, 2), np.float32)}, r"'fc' has shape \(4, 2\), the model's has \(2, 4\)"),
        ({"bias": np.ones(1, np.float32)}, r"'bias' has shape \(1,\), the model's has \(\)"),
        ({"mean": np.ones(3)}, "'mean' has type <f8, the model's has <f4"),
        ({"mean": np.ones(3, ">f4")}, "'mean' has type >f4, the model's has <f4"),
        ({"count": np.asarray(2.0)}, "'count' has type <f8, the model's has <i8"),
        ({"mean": np.array([1, np.nan, 3], np.float32)}, "'mean' .* element 1 is nan"),
        ({"bias": np.asarray(-np.inf, np.float32)}, "'bias' .* element 0 is -inf"),
        ({"fc": b"\x93NUMPY"}, "'fc': not a NumPy array"),
    ],
)
def test_a_reply_unlike_the_model_is_refused_by_name_and_value(
    changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(BadReply, match=message):
        decode_model(record(**changes), Layout.of(model(), BUFFERS))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num-examples": 0}, r"'num-examples' must be in \[1, .*got 0"),
        ({"num-examples": -5}, "got -5"),
        ({"num-examples": math.nan}, "'num-examples' is not finite: nan"),
        ({"num-examples": [3, 4]}, "must be one number"),
        ({"num-examples": None}, "must be one number, got None"),
        ({"train-loss": math.inf}, "'train-loss' is not finite: inf"),
        ({"per-layer": [1.0, math.nan]}, "'per-layer' is not finite"),
        ({"lambda": -0.1}, r"'lambda' must be in \[0, 5\], got -0\.1"),
        ({"lambda": None}, "'lambda' must be one number"),
    ],
)
def test_scalars_out_of_range_are_refused_by_name_and_value(
    changes: dict[str, Any], message: str
) -> None:
    bounds = {"num-examples": (1, 2**53), "lambda": (0.0, 5.0)}
    scalars = {"num-examples": 12, "train-loss": 0.3, "lambda": 5.0, "per-layer": [1.0, 2.0]}
    check_scalars(scalars, bounds)
    changed = {n: v for n, v in (scalars | changes).items() if v is not None}
    with pytest.raises(BadReply, match=message):
        check_scalars(changed, bounds)
