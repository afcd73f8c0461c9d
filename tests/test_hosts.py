"""Nodes that host several clients: whatever is true of one client per node is true of these."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flwr.app import Message
from hosted import CLIENTS, SHAPES, admm, federation, shared, state_of
from laws import START, Row, every_algorithm, local, train
from problems import make_client_app, quadratics, to_record, to_vector

from clients import AnyAlgorithmClient, DirectoryStore, InProcessGrid, client_id
from fl_strategies import Checkpoints, FedAvg, RoundInfo
from fl_strategies.messages import hosting

# ---- however clients are spread -----------------------------------------------------------------


@cache
def undisturbed(rounds: int) -> np.ndarray:
    """Return the model of FedADMM's clients, each on a node of its own."""
    return train(admm(), federation("nodes of one"), rounds)


def model_and_numbers(row: Row, shape: str) -> tuple[np.ndarray, list[Any]]:
    """Return the model after four rounds, and each round's numbers and clients' rows."""
    numbers: list[Any] = []

    def note(info: RoundInfo) -> None:
        passing = ("bytes", "eval-bytes", "seconds", "busy")
        kept = {n: v for n, v in info.metrics.items() if not n.startswith(passing)}
        numbers.append((kept, {c: dict(row) for c, row in info.clients.items()}))

    options: dict[str, Any] = {"fraction_evaluate": 0.5, "fraction_train": 0.5, **shared(shape)}
    strategy = row.strategy(local=local(), callbacks=[note], **options)
    return train(strategy, federation(shape), 4), numbers


@pytest.mark.sampled("fedadmm")
@every_algorithm
def test_models_and_numbers_are_the_same_to_the_bit_however_clients_are_spread(row: Row) -> None:
    model, numbers = model_and_numbers(row, "nodes of one")
    for shape in SHAPES.keys() - {"nodes of one"}:
        other, others = model_and_numbers(row, shape)
        np.testing.assert_array_equal(other, model, err_msg=shape)
        assert others == numbers, shape


@pytest.mark.parametrize("most", [1, 2])
@pytest.mark.parametrize("by", ["bytes", "clients"])
def test_messages_are_about_a_bounded_number_of_clients(
    by: str, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes: list[int] = []

    def count(request: Message, reply: Message) -> Message:
        if request.metadata.message_type == "train":
            sizes.append(len(hosting.unpack_request(request.content)[1]))
        return reply

    size = sum(len(array.data) for array in to_record(START).values())
    expected = undisturbed(4)
    if by == "bytes":
        monkeypatch.setattr(hosting, "MOST_BYTES", most * size)
    one = admm(clients_per_message=most) if by == "clients" else admm()
    np.testing.assert_array_equal(train(one, federation(fault=count), 4), expected)
    assert max(sizes) == most
    assert sum(sizes) == 4 * 3


def test_a_model_beyond_the_bound_goes_alone() -> None:
    assert hosting.per_message(10**12) == 1
    assert hosting.per_message(0) == hosting.MOST_CLIENTS


def test_a_host_gets_the_model_once_and_of_each_client_what_it_is_told_alone() -> None:
    seen: list[Message] = []
    train(admm(fraction_train=1.0), federation("1 host", fault=lambda q, a: seen.append(q) or a), 2)
    first, second = (m.content for m in seen if m.metadata.message_type == "train")
    assert [*first.array_records] == ["arrays"]
    assert first["hosted"] == {"per-client-0": [*range(CLIENTS)]}
    assert first["config"]["acked-round"] == -1
    assert second["config"]["acked-round"] == 1
    assert not first["per-client-0"]


# ---- what fails ---------------------------------------------------------------------------------


class Failing(AnyAlgorithmClient):
    """Client 1 raises in training, and client 4 returns an array of another shape, from round 2."""

    def __init__(self, problem: Any, *, client_id: int, **options: Any) -> None:
        super().__init__(problem, client_id=client_id, **options)
        self.number = client_id

    def fit(self, parameters: Any, config: Any) -> Any:
        arrays, samples, metrics = super().fit(parameters, config)
        if config["server-round"] > 1 and self.number == 1:
            raise RuntimeError("its disk is full")
        if config["server-round"] > 1 and self.number == 4:
            arrays = [arrays[0], arrays[1][:0]]
        return arrays, samples, metrics


@cache
def without_hosts(client: type[AnyAlgorithmClient]) -> np.ndarray:
    """Return the model after five rounds of all clients, each on a node of its own."""
    return train(admm(fraction_train=1.0), federation("nodes of one", client=client), 5)


@pytest.mark.parametrize("shape", SHAPES)
def test_a_failing_client_takes_no_other_with_it(
    shape: str, caplog: pytest.LogCaptureFixture
) -> None:
    counts: list[Any] = []
    watch = [lambda info: counts.append((info.metrics["clients-used"], {*info.clients}))]
    one = admm(shape, fraction_train=1.0, callbacks=watch)
    found = train(one, federation(shape, client=Failing), 5)
    np.testing.assert_array_equal(found, without_hosts(Failing))
    assert counts[1:] == [(4, {0, 2, 3, 5})] * 4
    assert one.run.faults.keys() == {1, 4}
    assert "its disk is full" in one.run.faults[1]
    assert one.ledger.acked == {0: 5, 1: 1, 2: 5, 3: 5, 4: 1, 5: 5}


class Renamed(AnyAlgorithmClient):
    """Client 1's arrays have names of their own."""

    @property
    def array_names(self) -> list[str]:
        names = super().array_names
        return [f"mine.{name}" for name in names] if self.client_id == 1 else names


@pytest.mark.parametrize("shape", SHAPES)
def test_a_client_whose_arrays_have_other_names_takes_no_other_with_it(shape: str) -> None:
    one = admm(shape, fraction_train=1.0)
    train(one, federation(shape, client=Renamed), 2)
    assert one.run.faults.keys() == {1}
    assert one.ledger.acked == dict.fromkeys([0, 2, 3, 4, 5], 2)


@pytest.mark.parametrize(("most", "lost"), [(1, {1}), (2, {0, 1}), (1000, {0, 1, 2})])
def test_a_slow_client_costs_a_round_the_clients_of_its_message(most: int, lost: set[int]) -> None:
    """From round 2 on, client 1 takes longer than the round."""

    def late(request: Message, reply: Message) -> Message | None:
        if request.content.config_records.get("config", {}).get("server-round", 0) < 2:
            return reply
        if hosting.is_hosted(request.content):
            return None if 1 in hosting.unpack_request(request.content)[1] else reply
        return None if request.metadata.dst_node_id in slow else reply

    one = admm(fraction_train=1.0, clients_per_message=most)
    found = train(one, federation(fault=late), 5)
    assert one.ledger.acked == {c: 1 if c in lost else 5 for c in range(CLIENTS)}
    nodes = federation("nodes of one", fault=late)
    slow = {node for place, node in enumerate(nodes.contexts) if place in lost}
    np.testing.assert_array_equal(found, train(admm(fraction_train=1.0), nodes, 5))


@pytest.mark.parametrize("shape", ["2 hosts", "1 host", "a host and nodes of one"])
def test_theta_is_the_mean_of_all_clients_u_whatever_hosts_lose(shape: str) -> None:
    """Lost host replies: their clients take back what they did, and nobody else does."""
    rng = np.random.default_rng(3)
    lost = lambda q, a: None if q.metadata.message_type == "train" and rng.random() < 0.4 else a  # noqa: E731
    grid = federation(shape, fault=lost)
    used: list[float] = []

    def check(info: RoundInfo) -> None:
        used.append(info.metrics["clients-used"])
        if used[-1] and shape != "a host and nodes of one":
            u = [START] * CLIENTS
            for client, acked in one.ledger.acked.items():
                f = state_of(grid, client, acked)
                u[client] = f["w"] + f["y"] / f["rho"]
            np.testing.assert_allclose(to_vector(info.arrays), np.mean(u, axis=0), atol=1e-12)

    one = admm(callbacks=[check])
    train(one, grid, 14)
    assert 0 in used
    assert len({*used}) > 1


def test_a_killed_host_comes_back_under_another_id_with_its_state() -> None:
    grid = federation()
    first, second = grid.contexts

    def restart(info: RoundInfo) -> None:
        if info.server_round == 3:  # its clients are the new node's, state and all
            context = grid.contexts.pop(first)
            context.node_id = 4711
            grid.contexts[4711] = context

    one = admm(callbacks=[restart])
    np.testing.assert_array_equal(train(one, grid, 8), undisturbed(8))
    assert one.nodes.known == {*range(CLIENTS)}
    assert second in grid.contexts


def test_what_a_host_keeps_does_not_grow_with_the_rounds() -> None:
    grid = federation()
    kept: list[int] = []

    def count(_: RoundInfo) -> None:
        kept.append(sum(len(context.state) for context in grid.contexts.values()))

    train(admm(fraction_train=1.0, callbacks=[count]), grid, 6)
    assert kept[-1] == kept[1] > 0


def test_a_client_moves_to_another_host_with_its_state_directory(tmp_path: Path) -> None:
    app = lambda: {"store": lambda c: DirectoryStore(tmp_path, client_id(c))}  # noqa: E731
    grid = federation("2 hosts", **app())
    other = federation("2 hosts, crossed and reversed", **app())

    def move(info: RoundInfo) -> None:
        if info.server_round == 4:
            grid.client_app = other.client_app

            grid.contexts.clear()
            for number, context in enumerate(other.contexts.values()):
                context.node_id = 9000 + number
                grid.contexts[9000 + number] = context

    np.testing.assert_array_equal(train(admm(callbacks=[move]), grid, 8), undisturbed(8))


@pytest.mark.parametrize("shape", SHAPES)
def test_a_run_goes_on_from_a_checkpoint_to_the_same_model(shape: str, tmp_path: Path) -> None:
    grid, folder = federation(shape), tmp_path / "checkpoints"
    train(admm(shape, checkpoints=Checkpoints(folder)), grid, 5)
    again = admm(shape, checkpoints=Checkpoints(folder))
    result = again.start(grid, to_record(START), 8, resume=True)
    np.testing.assert_array_equal(to_vector(result.arrays), undisturbed(8))


# ---- hosts that are late ------------------------------------------------------------------------


class Late(InProcessGrid):
    """The first of two hosts answers in odd rounds only after the next round is over."""

    def __init__(self, like: InProcessGrid) -> None:
        vars(self).update(vars(like))
        self.first, self.waiting = next(iter(self.contexts)), list[Message]()

    def answer(self, message: Message) -> Message | None:
        train = message.metadata.message_type == "train"
        if train and message.metadata.dst_node_id == self.first:
            late = message.content["config"]["server-round"] % 2 == 1
            if late:
                self.waiting.append(message)
                return None
        return super().answer(message)

    def catch_up(self, info: RoundInfo) -> None:
        if info.server_round % 2 == 0:
            while self.waiting:
                super().answer(self.waiting.pop(0))


@pytest.mark.slow
def test_a_late_host_cannot_undo_what_another_has_done_for_a_client_since(tmp_path: Path) -> None:
    """Two hosts share clients and their folder; what comes late was lost."""

    def run(*, catches_up: bool) -> tuple[np.ndarray, Any]:
        folder = tmp_path / str(catches_up)
        store = lambda c: DirectoryStore(folder, client_id(c))  # noqa: E731
        app = make_client_app(quadratics(CLIENTS), hosts=CLIENTS, store=store)
        grid = Late(InProcessGrid(app, 2))
        callbacks = [grid.catch_up] if catches_up else []
        one = admm(
            fraction_train=1.0,
            shared_population=CLIENTS,
            callbacks=callbacks,
            lost_state="refuse",
        )
        return train(one, grid, 9), one.ledger.acked

    expected, found = run(catches_up=False), run(catches_up=True)
    np.testing.assert_array_equal(found[0], expected[0])
    assert found[1] == expected[1]


def test_the_order_of_clients_in_a_message_does_not_matter() -> None:
    """Configs by client stay theirs, and replies are read by client."""

    class Reversed(InProcessGrid):
        def answer(self, message: Message) -> Message | None:
            if message.metadata.message_type == "train":
                arrays, configs = hosting.unpack_request(message.content)
                turned = dict(reversed(configs.items()))
                message.content = hosting.pack_request(("arrays", "config"), arrays, turned)
            return super().answer(message)

    grid = federation("1 host")
    grid.__class__ = Reversed
    np.testing.assert_array_equal(train(admm(), grid, 4), undisturbed(4))


def test_the_bytes_down_of_a_round_do_not_depend_on_a_shared_populations_hosts() -> None:
    def bytes_of(hosts: int) -> float:
        app = make_client_app(quadratics(6), hosts=6 if hosts else None)
        one = FedAvg(fraction_evaluate=0.0, shared_population=6 if hosts else 0)
        result = one.start(InProcessGrid(app, 6, hosts=hosts), to_record(START), 1)
        return float(result.train_metrics_clientapp[1]["bytes-down"])  # type: ignore[arg-type]

    assert bytes_of(1) == bytes_of(2) == bytes_of(0)
