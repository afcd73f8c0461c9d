"""The wire: a model's layout, its arrays as bytes, and replies that differ from it."""

from __future__ import annotations

import math
import pickle
from itertools import permutations
from typing import Any

import numpy as np
import pytest
from flwr.app import Array
from hypothesis import given, settings
from hypothesis import strategies as st
from tampering import Bomb, claims, headed, npy, npz

from fl_strategies.core.layout import BufferMean, Layout
from fl_strategies.core.records import BadReply
from fl_strategies.messages.wire import check_scalars, decode, decode_model

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


DATA = GOOD.tobytes()
HOSTILE = {
    "nothing": b"",
    "noise": bytes(range(256)),
    "pickle": pickle.dumps(Bomb()),
    "pickled objects": npy(np.array([Bomb()], dtype=object), allow_pickle=True),
    "objects by name": claims("'|O'", "(6,)", DATA),
    "objects in a record": claims("[('a', '|O'), ('b', '<f8')]", "(3,)", DATA),
    "npz": npz(a=GOOD),
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
        ({"num-examples": None}, "metric 'num-examples' is missing"),
        ({"train-loss": math.inf}, "'train-loss' is not finite: inf"),
        ({"per-layer": [1.0, math.nan]}, "'per-layer' is not finite"),
        ({"lambda": -0.1}, r"'lambda' must be in \[0, 5\], got -0\.1"),
        ({"lambda": None}, "'lambda' is missing"),
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
