"""Laws of what clients keep between rounds: both stores obey the same ones."""

from __future__ import annotations

import ast
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from flwr.app import Context, RecordDict
from problems import grid, quadratics, to_record, to_vector
from states import CLIENT, OWNER, assert_version, version

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
from clients.keeping import from_fields, to_fields
from clients.node.in_process import InProcessGrid
from clients.node.state import Store, fresh_nonce, peek, settle
from fl_strategies import FedADMM


def context(client: int = CLIENT) -> Context:
    return Context(
        run_id=1,
        node_id=77,
        node_config={"partition-id": client},
        state=RecordDict(),
        run_config={},
    )


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


# ---- through a client ---------------------------------------------------------------------------


def admm(store: Store | None) -> FedADMMClient:
    training = LocalTraining(solver="gd", lr=0.2, epochs=2)
    return FedADMMClient(
        quadratics(1)[0].problem(), client_id=CLIENT, store=store, training=training
    )


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
    new = admm(None)
    owner = new.keeper({}, new.settings({})).owner({})
    fields = dict(reopen().load(owner, 1))
    del fields[field]
    reopen().save(owner, 1, fields)
    again, other = fit(admm(reopen()), 1, 1)
    assert f"client 3 begins anew: the state lacks ['{field}']" in caplog.text
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
    return [to_vector(result.arrays).tolist(), dict(strategy.run.faults)]


def test_a_directory_of_clients_states_belongs_to_one_run(
    federation: InProcessGrid, tmp_path: Path
) -> None:
    """A second one is refused, training and evaluating; the first goes on as if alone."""
    one, other, twin = (FedADMM(rho=0.5) for _ in range(3))
    alone = grid(quadratics(3))
    assert started(one, federation, 2) == started(twin, alone, 2)
    assert started(other, federation)[1].keys() == {0, 1, 2}
    for reason in other.run.faults.values():
        assert f"holds the state of run '{one.run.id}', not of '{other.run.id}'" in reason
    assert other.result.train_metrics_clientapp[1]["clients-used"] == 0
    assert other.result.evaluate_metrics_clientapp[1]["eval-clients-used"] == 0
    assert started(one, federation, 2) == started(twin, alone, 2)
    assert one.result.evaluate_metrics_clientapp[4]["eval-clients-used"] == 3


def test_an_algorithm_with_state_needs_a_store() -> None:
    with pytest.raises(ValueError, match="fedadmm keeps state on its clients: give them a store"):
        fit(admm(None), 1, -1)


def test_state_never_goes_through_pickle() -> None:
    """No module of either half imports pickle or calls what unpickles.

    But for those that speak with worker processes of their own.
    """
    suspects = {"pickle", "cPickle", "dill", "cloudpickle", "joblib", "shelve", "marshal"}
    for package in (clients, fl_strategies):
        folder = Path(package.__file__).parent
        files = {*folder.rglob("*.py")} - {*folder.glob("apps/*/**/*.py")}  # what a user may save
        files -= {folder / "node/packing.py", folder / "node/workers.py"}
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
                elif isinstance(node, ast.Attribute) and node.attr in ("load", "save"):
                    assert ast.unparse(node) not in {"torch.load", "torch.save", "np.load"}, path


class Counts(NamedTuple):
    seen: torch.Tensor
    mask: torch.Tensor


def test_whole_numbers_and_truth_values_of_a_state_keep_their_type() -> None:
    state = Counts(torch.tensor([2**24 + 1, 3]), torch.tensor([True, False]))
    found: Any = from_fields(Counts, to_fields(state), torch.zeros(2))
    for before, after in zip(state, found, strict=True):
        assert before.dtype == after.dtype
        assert torch.equal(before, after)


def test_a_tensor_state_on_the_way_in_is_of_the_models_type(reopen: Callable[[], Store]) -> None:
    client = admm(reopen())
    fit(client, 1, -1)
    request = {"acked-round": 1}
    keeper = admm(reopen()).keeper(request, client.settings(request))
    state = keeper.peeked(request, client.problem.model.vector.float()).state
    assert state.w.dtype == state.y.dtype == torch.float32
    assert isinstance(state.rho, float)
