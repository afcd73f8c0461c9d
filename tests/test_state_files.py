"""State files: owners, interrupted writes, and every kind of damage."""

from __future__ import annotations

import json
import os
import stat
import struct
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from states import CLIENT, OWNER, assert_version, version

from clients import DirectoryStore, Owner, StateError
from clients.node.state import DamagedState, settle
from fl_strategies.core.files import save_arrays, write_atomically


def the_file(directory: Path, server_round: int = 5) -> Path:
    return directory / str(CLIENT) / f"{server_round}.safetensors"


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
    states = tmp_path / "states"
    folders, files = [states, states / "3"], [states / "owner.json", the_file(states)]
    assert {*states.rglob("*")} == {*files, states / "3"}
    assert {stat.S_IMODE(path.stat().st_mode) for path in folders} == {0o700}
    assert {stat.S_IMODE(path.stat().st_mode) for path in files} == {0o600}


def test_a_truncated_file_is_recognised(tmp_path: Path) -> None:
    store = DirectoryStore(tmp_path, CLIENT)
    store.save(OWNER, 5, version(5))
    whole = the_file(tmp_path).read_bytes()
    for length in (0, 4, 8, 20, len(whole) // 2, len(whole) - 1):
        the_file(tmp_path).write_bytes(whole[:length])
        with pytest.raises(StateError, match=r"3/5\.safetensors is damaged"):
            settle(store, OWNER, 5)


@pytest.mark.slow
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


@pytest.mark.parametrize("durable", [True, False])
def test_a_durable_write_reaches_the_disk_with_its_name(
    durable: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The name is in the folder: without its fsync a crash of the machine may lose it."""
    synced: list[Path] = []
    monkeypatch.setattr(
        os, "fsync", lambda one: synced.append(Path(f"/proc/self/fd/{one}").resolve())
    )
    path = tmp_path / "file"
    write_atomically(path, b"whole", durable=durable)
    assert path.read_bytes() == b"whole"
    assert [one.parent if one != tmp_path else one for one in synced] == [tmp_path] * 2 * durable
    assert synced[-1:] == [tmp_path] * durable


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
    (tmp_path / "3").rename(tmp_path / "4")
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
    found = {path for path in tmp_path.rglob("*") if path.is_file()}
    assert found == {tmp_path / "owner.json", the_file(tmp_path)}


def test_what_is_no_file_or_has_another_spelling_is_no_version(tmp_path: Path) -> None:
    store = DirectoryStore(tmp_path, CLIENT)
    store.save(OWNER, 5, version(5))
    (tmp_path / "3/7.safetensors").mkdir()
    for name in ("007.safetensors", "\u0663.safetensors", "5 (copy).safetensors"):
        (tmp_path / "3" / name).write_bytes(the_file(tmp_path).read_bytes())
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
        with pytest.raises(DamagedState, match=r"3/5\.safetensors is damaged: "):
            store.load(OWNER, 5)
    for text in TEXTS:
        save_arrays(the_file(tmp_path), version(5), text)
        with pytest.raises(DamagedState, match=r"3/5\.safetensors is damaged: "):
            store.load(OWNER, 5)


def test_what_cannot_be_read_is_a_damaged_state(tmp_path: Path) -> None:
    with pytest.raises(DamagedState, match=r"3/5\.safetensors cannot be read: No such file"):
        DirectoryStore(tmp_path, CLIENT).load(OWNER, 5)


@pytest.mark.parametrize("client", [-1, 1.0, "3", "../3", None, True])
def test_a_client_id_is_a_natural_number(tmp_path: Path, client: Any) -> None:
    with pytest.raises(ValueError, match="client_id must be an integer >= 0, got"):
        DirectoryStore(tmp_path, client)
