"""Laws of what clients keep between rounds: both stores obey the same ones."""

from __future__ import annotations

import ast
import os
import stat
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import Context, RecordDict
from problems import quadratics

import clients
import fl_strategies
from clients import ContextStore, DirectoryStore, FedADMMClient, LocalTraining, Owner, StateError
from clients.state import Store, fresh_nonce, peek, settle

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


def test_saving_does_not_write_into_or_keep_the_callers_arrays(
    reopen: Callable[[], Store],
) -> None:
    fields = version(4)
    fields["w"] = np.arange(12, dtype=np.float64)[::2]  # not contiguous
    reopen().save(OWNER, 4, fields)
    np.testing.assert_array_equal(fields["w"], [0, 2, 4, 6, 8, 10])
    fields["w"][:] = -1
    np.testing.assert_array_equal(reopen().load(OWNER, 4)["w"], [0, 2, 4, 6, 8, 10])


def test_nonces_differ() -> None:
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


def test_files_are_their_owners_alone(tmp_path: Path) -> None:
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


def test_an_algorithm_with_state_needs_a_store() -> None:
    with pytest.raises(ValueError, match="fedadmm keeps state on its clients: give them a store"):
        fit(admm(None), 1, -1)


def test_state_never_goes_through_pickle() -> None:
    """No module of either half imports pickle or calls what unpickles."""
    suspects = {"pickle", "cPickle", "dill", "cloudpickle", "joblib", "shelve", "marshal"}
    for package in (clients, fl_strategies):
        files = list(Path(package.__file__).parent.glob("*.py"))
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
    _, fields = peek(reopen(), client._owner(), 1)
    assert fields is not None
    state = client._from_fields(fields, client.problem.model.vector.float())
    assert state.w.dtype == state.y.dtype == torch.float32
    assert isinstance(state.rho, float)
