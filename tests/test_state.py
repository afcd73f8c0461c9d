"""Laws of what clients keep between rounds: both stores obey the same ones."""

from __future__ import annotations

import ast
import json
import os
import stat
import struct
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import Context, RecordDict
from problems import grid, quadratics, to_record, to_vector

import clients
import fl_strategies
from clients import (
    ContextStore,
    DirectoryStore,
    FedADMMClient,
    LocalTraining,
    Owner,
    StateError,
    client_id,
)
from clients.node.in_process import InProcessGrid
from clients.node.state import DamagedState, Store, fresh_nonce, peek, settle
from fl_strategies import FedADMM
from fl_strategies.core.files import save_arrays

OWNER = Owner("fedadmm", "0123456789abcdef")
CLIENT = 3


def context(client: int = CLIENT) -> Context:
    return Context(
        run_id=1,
        node_id=77,
        node_config={"partition-id": client},
        state=RecordDict(),
        run_config={},
    )


def version(number: float) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(int(number))
    return {
        "w": rng.normal(size=6).astype(np.float32),
        "y": rng.normal(size=6),
        "rho": np.asarray(number / 7),
        "nonce": np.frombuffer(b"abc123", np.uint8),
    }


@pytest.fixture(params=["context", "directory"])
def reopen(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[[], Store]:
    """Return a function that opens the same client's store anew, as the next message does."""
    kept = context()
    if request.param == "context":
        return lambda: ContextStore(kept)
    return lambda: DirectoryStore(tmp_path / "states", CLIENT)


def save_rounds(reopen: Callable[[], Store], *rounds: int) -> None:
    for server_round in rounds:
        reopen().save(OWNER, server_round, version(server_round))


def assert_version(fields: Any, number: int) -> None:
    assert fields is not None
    assert fields.keys() == version(number).keys()
    for name, value in version(number).items():
        np.testing.assert_array_equal(fields[name], value)
        assert fields[name].dtype == value.dtype
        assert fields[name].shape == value.shape


def test_what_is_saved_comes_back(reopen: Callable[[], Store]) -> None:
    save_rounds(reopen, 12, 4, 9)
    assert reopen().rounds(OWNER) == [4, 9, 12]
    for number in (4, 9, 12):
        assert_version(reopen().load(OWNER, number), number)
    reopen().save(OWNER, 9, version(5))
    assert_version(reopen().load(OWNER, 9), 5)


@pytest.mark.parametrize("acked", [2, 5, 8])
def test_the_acknowledged_version_stands_and_all_others_go(
    reopen: Callable[[], Store], acked: int
) -> None:
    save_rounds(reopen, 2, 5, 8)
    standing, fields = settle(reopen(), OWNER, acked)
    assert standing == acked
    assert_version(fields, acked)
    assert reopen().rounds(OWNER) == [acked]
    assert_version(settle(reopen(), OWNER, acked)[1], acked)  # settled once more, it stands


def test_a_reply_that_was_never_used_is_undone(reopen: Callable[[], Store]) -> None:
    save_rounds(reopen, 2)
    assert settle(reopen(), OWNER, -1) == (-1, None)
    assert reopen().rounds(OWNER) == []


def test_a_newcomer_has_no_state(reopen: Callable[[], Store]) -> None:
    for acked in (-1, None):
        assert settle(reopen(), OWNER, acked) == (-1, None)
        assert peek(reopen(), OWNER, acked) == (-1, None)


def test_a_client_that_lost_the_acknowledged_state_is_a_newcomer(
    reopen: Callable[[], Store],
) -> None:
    save_rounds(reopen, 5)
    assert settle(reopen(), OWNER, 4) == (-1, None)
    assert reopen().rounds(OWNER) == []


def test_a_server_that_does_not_say_gets_the_newest(reopen: Callable[[], Store]) -> None:
    save_rounds(reopen, 2, 11, 5)
    standing, fields = settle(reopen(), OWNER, None)
    assert standing == 11
    assert_version(fields, 11)
    assert reopen().rounds(OWNER) == [11]


@pytest.mark.parametrize("acked", [-1, 2, 4, 5, None])
def test_peeking_sees_what_settling_would_and_changes_nothing(
    reopen: Callable[[], Store], acked: int | None
) -> None:
    save_rounds(reopen, 2, 5)
    seen, fields = peek(reopen(), OWNER, acked)
    assert reopen().rounds(OWNER) == [2, 5]
    standing, settled = settle(reopen(), OWNER, acked)
    assert seen == standing
    assert (fields is None) == (settled is None)
    if settled is not None:
        assert_version(fields, standing)


@pytest.mark.parametrize(
    "other", [Owner("fedprox", OWNER.model), Owner(OWNER.algorithm, "fedcba9876543210")]
)
def test_the_state_of_another_algorithm_or_model_is_refused(
    reopen: Callable[[], Store], other: Owner
) -> None:
    save_rounds(reopen, 2)
    message = f"algorithm 'fedadmm' and model {OWNER.model}, not of '{other.algorithm}' and"
    for ask in (settle, peek):
        with pytest.raises(StateError, match=message):
            ask(reopen(), other, 2)
    assert reopen().rounds(OWNER) == [2]


@pytest.mark.parametrize("other", ["another", ""])
def test_the_state_of_another_run_is_refused_and_kept(
    reopen: Callable[[], Store], other: str
) -> None:
    mine, theirs = replace(OWNER, run="one"), replace(OWNER, run=other)
    reopen().save(mine, 2, version(2))
    asks: list[Callable[[], Any]] = [
        lambda: settle(reopen(), theirs, -1),
        lambda: peek(reopen(), theirs, 2),
        lambda: reopen().save(theirs, 2, version(3)),
    ]
    for ask in asks:
        with pytest.raises(StateError, match=f"holds the state of run 'one', not of '{other}'"):
            ask()
    assert reopen().rounds(mine) == [2]
    assert_version(reopen().load(mine, 2), 2)


def test_saving_does_not_write_into_or_keep_the_callers_arrays(
    reopen: Callable[[], Store],
) -> None:
    fields = version(4)
    fields["w"] = np.arange(12, dtype=np.float64)[::2]  # not contiguous
    reopen().save(OWNER, 4, fields)
    np.testing.assert_array_equal(fields["w"], [0, 2, 4, 6, 8, 10])
    fields["w"][:] = -1
    np.testing.assert_array_equal(reopen().load(OWNER, 4)["w"], [0, 2, 4, 6, 8, 10])


def test_no_two_states_have_the_same_nonce() -> None:
    assert len({fresh_nonce() for _ in range(100)}) == 100


# ---- the directory ------------------------------------------------------------------------------


def the_file(directory: Path, server_round: int = 5) -> Path:
    return directory / f"{CLIENT}.{server_round}.safetensors"


def test_clients_share_a_directory_without_seeing_each_other(tmp_path: Path) -> None:
    stores = {client: DirectoryStore(tmp_path, client) for client in (1, 11, 111, 0)}
    for client, store in stores.items():
        store.save(OWNER, 1, version(client))
        store.save(OWNER, 11, version(client + 1))
    settle(stores[1], OWNER, 11)
    assert stores[1].rounds(OWNER) == [11]
    for client in (0, 11, 111):
        assert stores[client].rounds(OWNER) == [1, 11]
        assert_version(stores[client].load(OWNER, 1), client)


def test_state_files_are_readable_by_their_owner_alone(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        DirectoryStore(tmp_path / "states", CLIENT).save(OWNER, 5, version(5))
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "states").stat().st_mode) == 0o700
    files = list((tmp_path / "states").iterdir())
    assert {path.name for path in files} == {"owner.json", "3.5.safetensors"}
    assert {stat.S_IMODE(path.stat().st_mode) for path in files} == {0o600}


def test_a_truncated_file_is_recognised(tmp_path: Path) -> None:
    store = DirectoryStore(tmp_path, CLIENT)
    store.save(OWNER, 5, version(5))
    whole = the_file(tmp_path).read_bytes()
    for length in (0, 4, 8, 20, len(whole) // 2, len(whole) - 1):
        the_file(tmp_path).write_bytes(whole[:length])
        with pytest.raises(StateError, match=r"3\.5\.safetensors is damaged"):
            settle(store, OWNER, 5)


def test_no_flipped_bit_goes_unnoticed(tmp_path: Path) -> None:
    """Everywhere in the file: header length, names, shapes, checksum, numbers."""
    store = DirectoryStore(tmp_path, CLIENT)
    store.save(OWNER, 5, version(5))
    whole = the_file(tmp_path).read_bytes()
    assert struct.unpack("<Q", whole[:8])[0] < len(whole)
    for place in range(len(whole)):
        damaged = bytearray(whole)
        damaged[place] ^= 1 << (place % 8)
        the_file(tmp_path).write_bytes(damaged)
        with pytest.raises(StateError):
            store.load(OWNER, 5)


def test_a_damaged_manifest_is_recognised(tmp_path: Path) -> None:
    store = DirectoryStore(tmp_path, CLIENT)
    store.save(OWNER, 5, version(5))
    for text in ("", "{", "[]", '{"algorithm": "fedadmm"}', '"fedadmm"'):
        (tmp_path / "owner.json").write_text(text)
        with pytest.raises(StateError, match=r"owner\.json is damaged"):
            store.rounds(OWNER)


def test_an_interrupted_write_leaves_the_old_state_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = DirectoryStore(tmp_path, CLIENT)
    store.save(OWNER, 5, version(5))
    files = sorted(tmp_path.iterdir())

    def interrupt(*args: Any) -> None:
        raise KeyboardInterrupt

    for name in ("replace", "fsync"):
        with monkeypatch.context() as patched:
            patched.setattr(os, name, interrupt)
            for server_round in (5, 6):
                with pytest.raises(KeyboardInterrupt):
                    store.save(OWNER, server_round, version(6))
    assert sorted(tmp_path.iterdir()) == files
    assert_version(store.load(OWNER, 5), 5)


def test_a_file_of_another_owner_is_refused_even_without_manifest(tmp_path: Path) -> None:
    store = DirectoryStore(tmp_path, CLIENT)
    store.save(OWNER, 5, version(5))
    (tmp_path / "owner.json").unlink()
    with pytest.raises(StateError, match="not of 'fedpd'"):
        store.load(Owner("fedpd", OWNER.model), 5)


def test_a_directory_can_be_checked_beforehand(tmp_path: Path) -> None:
    DirectoryStore.check(tmp_path / "none yet", OWNER)
    DirectoryStore(tmp_path, CLIENT).save(OWNER, 5, version(5))
    DirectoryStore.check(tmp_path, OWNER)
    with pytest.raises(StateError, match="not of 'fedavg'"):
        DirectoryStore.check(tmp_path, Owner("fedavg", OWNER.model))


def test_a_file_of_another_client_is_refused(tmp_path: Path) -> None:
    DirectoryStore(tmp_path, CLIENT).save(OWNER, 5, version(5))
    the_file(tmp_path).rename(tmp_path / "4.5.safetensors")
    with pytest.raises(StateError, match="holds the state of client 3, not of client 4"):
        settle(DirectoryStore(tmp_path, 4), OWNER, 5)


@pytest.mark.parametrize("links", [True, False])
def test_of_two_runs_that_begin_at_once_one_is_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, links: bool
) -> None:
    """Both find no manifest and write one. Without hard links a look beforehand has to do."""

    def no_links(*_: Any) -> None:
        raise PermissionError("no hard links here")

    exists = Path.exists
    if links:
        monkeypatch.setattr(Path, "exists", lambda p: p.name != "owner.json" and exists(p))
    else:
        monkeypatch.setattr(os, "link", no_links)
    one, other = (replace(OWNER, run=run) for run in ("one", "other"))
    stores = [DirectoryStore(tmp_path, CLIENT) for _ in range(2)]
    assert settle(stores[0], one, -1) == settle(stores[1], other, -1) == (-1, None)
    stores[0].save(one, 5, version(1))
    with pytest.raises(StateError, match="run 'one', not of 'other'"):
        stores[1].save(other, 5, version(2))
    assert_version(stores[0].load(one, 5), 1)
    assert {path.name for path in tmp_path.iterdir()} == {"owner.json", the_file(tmp_path).name}


def test_what_is_no_file_or_has_another_spelling_is_no_version(tmp_path: Path) -> None:
    store = DirectoryStore(tmp_path, CLIENT)
    store.save(OWNER, 5, version(5))
    (tmp_path / "3.7.safetensors").mkdir()
    for name in ("3.007.safetensors", "3.\u0663.safetensors", "3.5 (copy).safetensors"):
        (tmp_path / name).write_bytes(the_file(tmp_path).read_bytes())
    assert store.rounds(OWNER) == [5]
    assert settle(store, OWNER, -1) == (-1, None)


HEADERS = [
    {"a": {"dtype": dtype, "shape": shape, "data_offsets": offsets}} | metadata
    for dtype in ("F64", "BF16", "F8_E4M3", "F4", "I8", "X", None)
    for shape in ([8], [-1], [2**62, 4], [0, 2**63], "8", None)
    for offsets in ([0, 64], [64, 0], [0, 2**64], [0], None)
    for metadata in ({}, {"__metadata__": {"sha256": "x"}}, {"__metadata__": {"sha256": 3}})
]
TEXTS = ["", "{", "[]", "3", "null", '"x"', "{}", '{"client": 3}', "[" * 100_000,
         '{"client": 3, "algorithm": 1, "model": 2, "run": 3}',
         '{"client": 3, "algorithm": "a", "model": "m", "run": "r", "more": 1}']  # fmt: skip


def test_a_made_up_header_or_text_is_a_damaged_state(tmp_path: Path) -> None:
    """Whatever it claims, and although a made-up text has the right checksum."""
    store = DirectoryStore(tmp_path, CLIENT)
    store.save(OWNER, 5, version(5))
    for header in [json.dumps(header).encode() for header in HEADERS] + [b"[" * 10_000, b"", b"{}"]:
        the_file(tmp_path).write_bytes(struct.pack("<Q", len(header)) + header + bytes(64))
        with pytest.raises(DamagedState, match=r"3\.5\.safetensors is damaged: "):
            store.load(OWNER, 5)
    for text in TEXTS:
        save_arrays(the_file(tmp_path), version(5), text)
        with pytest.raises(DamagedState, match=r"3\.5\.safetensors is damaged: "):
            store.load(OWNER, 5)


def test_what_cannot_be_read_is_a_damaged_state(tmp_path: Path) -> None:
    with pytest.raises(DamagedState, match=r"3\.5\.safetensors cannot be read: No such file"):
        DirectoryStore(tmp_path, CLIENT).load(OWNER, 5)


@pytest.mark.parametrize("client", [-1, 1.0, "3", "../3", None, True])
def test_a_client_id_is_a_natural_number(tmp_path: Path, client: Any) -> None:
    with pytest.raises(ValueError, match="client_id must be an int >= 0, got"):
        DirectoryStore(tmp_path, client)


# ---- through a client ---------------------------------------------------------------------------


def admm(store: Store | None) -> FedADMMClient:
    training = LocalTraining(solver="gd", lr=0.2, epochs=2)
    return FedADMMClient(quadratics(1)[0].problem(), client_id=0, store=store, training=training)


def fit(client: FedADMMClient, server_round: int, acked: int | None) -> tuple[np.ndarray, str]:
    model = client.problem.model
    theta = [np.full(model.layout.shapes[name], 0.1 * server_round) for name in model.names]
    config = {"rho": 0.5, "local-start": "client", "tracking": "client"}
    config |= {"server-round": server_round} | ({} if acked is None else {"acked-round": acked})
    arrays, _, metrics = client.fit(theta, config)
    return np.concatenate([np.ravel(a) for a in arrays]), metrics["state-nonce"]


def test_a_lost_reply_is_as_if_never_made(reopen: Callable[[], Store]) -> None:
    fit(admm(reopen()), 1, -1)
    lost, _ = fit(admm(reopen()), 2, 1)
    got, nonce = fit(admm(reopen()), 3, 1)  # round 2 was not used
    twin = ContextStore(context())
    _, first = fit(admm(twin), 1, -1)
    expected, same = fit(admm(twin), 3, 1)
    np.testing.assert_array_equal(got, expected)
    assert not np.array_equal(got, lost)
    assert nonce != same  # two lives
    assert first == same  # one life


def test_a_state_begun_anew_has_a_new_nonce(reopen: Callable[[], Store]) -> None:
    _, first = fit(admm(reopen()), 1, -1)
    _, kept = fit(admm(reopen()), 2, 1)
    _, reset = fit(admm(reopen()), 3, -1)
    assert first == kept != reset


def test_state_survives_the_store_to_the_bit(reopen: Callable[[], Store]) -> None:
    """Both stores give the same uploads, and those of FedADMM written out in matrices."""
    uploads = [fit(admm(reopen()), t, t - 1 if t > 1 else -1)[0] for t in (1, 2, 3)]
    other = ContextStore(context())
    again = [fit(admm(other), t, t - 1 if t > 1 else -1)[0] for t in (1, 2, 3)]
    np.testing.assert_array_equal(uploads, again)
    quadratic, rho = quadratics(1)[0], 0.5
    w = np.full(5, 0.1)
    y = np.zeros(5)
    for t, upload in zip((1, 2, 3), uploads, strict=True):
        theta, before = np.full(5, 0.1 * t), w + y / rho
        for _ in range(2):
            w = w - 0.2 * (quadratic.gradient(w) + y + rho * (w - theta))
        y = y + rho * (w - theta)
        np.testing.assert_allclose(upload, w + y / rho - before, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("field", ["w", "y", "nonce"])
def test_a_state_that_lacks_a_field_counts_as_a_lost_state(
    reopen: Callable[[], Store], field: str, caplog: pytest.LogCaptureFixture
) -> None:
    first, nonce = fit(admm(reopen()), 1, -1)
    owner = admm(None).keeper.owner({})
    fields = dict(reopen().load(owner, 1))
    del fields[field]
    reopen().save(owner, 1, fields)
    again, other = fit(admm(reopen()), 1, 1)
    assert f"client 0 begins anew: the state lacks ['{field}']" in caplog.text
    np.testing.assert_array_equal(first, again)
    assert nonce != other


# ---- through a run ------------------------------------------------------------------------------


@pytest.fixture(params=["context", "directory"])
def federation(request: pytest.FixtureRequest, tmp_path: Path) -> InProcessGrid:
    """Clients that are made anew for each message, with stores of either kind."""
    if request.param == "context":
        return grid(quadratics(3))
    return grid(quadratics(3), store=lambda c: DirectoryStore(tmp_path, client_id(c)))


def started(strategy: FedADMM, federation: InProcessGrid, rounds: int = 1) -> list[Any]:
    result = strategy.start(federation, to_record(np.zeros(5)), rounds)
    return [to_vector(result.arrays).tolist(), dict(strategy.faults)]


def test_a_directory_of_clients_states_belongs_to_one_run(
    federation: InProcessGrid, tmp_path: Path
) -> None:
    """A second one is refused, training and evaluating; the first goes on as if alone."""
    one, other, twin = (FedADMM(rho=0.5) for _ in range(3))
    alone = grid(quadratics(3))
    assert started(one, federation, 2) == started(twin, alone, 2)
    assert started(other, federation)[1].keys() == {0, 1, 2}
    for reason in other.faults.values():
        assert f"holds the state of run '{one.run.id}', not of '{other.run.id}'" in reason
    assert other.result.train_metrics_clientapp[1]["clients-used"] == 0
    assert other.result.evaluate_metrics_clientapp[1]["eval-clients-used"] == 0
    assert started(one, federation, 2) == started(twin, alone, 2)
    assert one.result.evaluate_metrics_clientapp[2]["eval-clients-used"] == 3


def test_an_algorithm_with_state_needs_a_store() -> None:
    with pytest.raises(ValueError, match="fedadmm keeps state on its clients: give them a store"):
        fit(admm(None), 1, -1)


def test_state_never_goes_through_pickle() -> None:
    """No module of either half imports pickle or calls what unpickles."""
    suspects = {"pickle", "cPickle", "dill", "cloudpickle", "joblib", "shelve", "marshal"}
    for package in (clients, fl_strategies):
        files = list(Path(package.__file__).parent.rglob("*.py"))
        assert files
        for path in files:
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.Import):
                    assert not suspects & {a.name.split(".")[0] for a in node.names}, path
                elif isinstance(node, ast.ImportFrom):
                    assert (node.module or "").split(".")[0] not in suspects, path
                    if node.module in ("torch", "numpy"):
                        assert not {"load", "save", "savez"} & {a.name for a in node.names}, path
                elif isinstance(node, ast.keyword) and node.arg in ("allow_pickle", "weights_only"):
                    assert ast.literal_eval(node.value) is (node.arg == "weights_only"), path
                elif isinstance(node, ast.Attribute):
                    assert ast.unparse(node) not in {"torch.load", "torch.save", "np.load"}, path


def test_a_tensor_state_on_the_way_in_is_of_the_models_type(reopen: Callable[[], Store]) -> None:
    client = admm(reopen())
    fit(client, 1, -1)
    request = {"acked-round": 1}
    state = admm(reopen()).keeper.peeked(request, client.problem.model.vector.float()).state
    assert state.w.dtype == state.y.dtype == torch.float32
    assert isinstance(state.rho, float)
