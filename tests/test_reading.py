"""Reading is a function of a reply and of what was asked."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, ConfigRecord, MetricRecord, RecordDict

from fl_strategies.core.layout import Layout
from fl_strategies.core.records import BadReply, Round, Upload
from fl_strategies.messages.bounds import NormBound
from fl_strategies.messages.identity import Identity
from fl_strategies.messages.wire import Expected
from fl_strategies.parts import TopK
from fl_strategies.server.asked import Asked, Policy
from fl_strategies.server.reading import check_fold, read, refused
from simulations.lab.calls import of_a_round

START = {"w": np.array([[1.0, 2.0]], np.float32), "b": np.array([0.5], np.float32)}


def recorded(words: dict[str, Any] | None = None, **numbers: Any) -> Any:
    """Return a client's reply as it came once: each number of its model is 1 more."""
    arrays = {name: array + np.float32(1) for name, array in START.items()}
    said = {"num-examples": 7, "train-loss": 0.25, **numbers}
    return RecordDict(
        {
            "arrays": ArrayRecord({name: Array(array) for name, array in arrays.items()}),
            "metrics": MetricRecord(said),
            "config": ConfigRecord({"algorithm": "fedx", **(words or {})}),
        }
    )


def asked(number: int = 3, **policy: Any) -> Asked:
    layout = Layout.of(START)
    identity = Identity("FedX", "fedx", "", layout)
    expected = Expected(2, "num-examples", None, {}, identity.admit)
    settled = {"expected": expected, **policy}
    return Asked(
        Round(number, layout.pack(START), layout), Policy(identity, layout, **settled), START
    )


def test_a_recorded_reply_is_read_without_a_strategy() -> None:
    reply, upload = read(asked(), 4, recorded())
    np.testing.assert_array_equal(upload.vector, [2.0, 3.0, 1.5])
    assert (reply.round, upload.round, upload.num_examples) == (3, 3, 7)
    assert reply.numbers == {"train-loss": 0.25}
    assert upload.received is None


def test_a_reply_of_an_earlier_phase_is_read_by_what_was_asked_then() -> None:
    """Its round, the model that it was sent, its bound: here half of the change, which is 3^0.5."""
    bound = NormBound(np.sqrt(3) / 2, lambda upload: [1.0, 2.0, 0.5], False, START)
    earlier = asked(1, bound=bound)
    now = Asked(Round(9, 0.0), asked(9).policy, by_client={4: earlier})
    reply, upload = read(now, 4, recorded())
    assert reply.round == 1
    np.testing.assert_allclose(upload.vector, [1.5, 2.5, 1.0], rtol=1e-12)
    np.testing.assert_array_equal(upload.received, [1.0, 2.0, 0.5])


@pytest.mark.parametrize(
    ("policy", "reply", "why"),
    [
        ({}, recorded({"algorithm": "fedy"}), "its client ran 'fedy' and FedX needs 'fedx'"),
        ({"told_bound": 1.0}, recorded(), "its update has norm 1.73205, above the clipping norm 1"),
        ({"tells_bound": True}, recorded(**{"clipping-norm": 1.5}), "above the clipping norm 1.5"),
        (
            {"intact": frozenset({"b"})},
            recorded({"checksums": "0 0"}),
            r"arrays \['b'\] are not as the client sent them",
        ),
        (
            {"expected": Expected(2, "num-examples", 6, {})},
            recorded(),
            r"7 samples, at most 6 \(max_samples\)",
        ),
        (
            {"expected": Expected(2, "num-examples", None, {"work": (1, 5)})},
            recorded(work=6.0),
            r"'work' must be in \[1, 5\], got 6",
        ),
    ],
    ids=["algorithm", "clipped", "told by the client", "intact", "samples", "bounds"],
)
def test_what_a_policy_says_is_checked(policy: dict[str, Any], reply: Any, why: str) -> None:
    with pytest.raises(BadReply, match=why):
        read(asked(**policy), 4, reply)


def test_a_code_is_read_only_as_it_was_asked_for() -> None:
    coded = asked(codec=TopK(share=0.5), coded="changes: topk share=0.5")
    with pytest.raises(BadReply, match=r"its codec is 'topk share=0\.5', the one asked for 'ch"):
        read(coded, 4, recorded({"compression": "topk share=0.5"}))


def test_the_rule_says_which_uploads_it_cannot_use() -> None:
    good = {client: read(asked(), client, recorded()) for client in (2, 4)}
    phase = asked(unusable=lambda uploads: {uploads[1].client: "it lost its state"})
    assert {c: str(fault) for c, fault in refused(phase, good).items()} == {4: "it lost its state"}


@pytest.mark.parametrize("far", [1.0, 1.1])
def test_a_hosts_mean_is_no_further_than_the_root_mean_square_of_its_clients(far: float) -> None:
    """Distances 0.6 and 1.4 with weights 3 and 1: the mean square is 0.76, here scaled to 1."""
    scale, folded = 0.76**-0.5, asked(weights=lambda uploads: [3.0, 1.0])
    phase = replace(folded, policy=replace(folded.policy, folded=folded.policy.expected))
    vector = phase.round.theta + far * np.array([0.6, 0.0, 0.8])
    uploads = [Upload(c, vector, 1.0, distance2=(scale * d) ** 2) for c, d in ((0, 0.6), (1, 1.4))]
    if far <= 1.0:
        check_fold(phase, uploads)
        return
    with pytest.raises(BadReply, match=r"its host's mean is 1\.1 from the model"):
        check_fold(phase, uploads)


def test_a_reply_counts_for_no_more_work_than_its_request_allows() -> None:
    allowed = asked(most_work=lambda config: 2.0)
    assert read(allowed, 4, recorded(work=6.0))[0].numbers["work"] == 2.0


def test_a_round_takes_no_more_calls_than_it_did() -> None:
    """Of our functions, on the server, for three clients: ``simulations.lab.calls``."""
    assert of_a_round().of.total() <= 294
