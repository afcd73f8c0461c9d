"""When a run gives up: all is unusable, and no client by itself can bring that about."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from flwr.app import Error, Message
from laws import START, Row, local, quiet
from problems import CLIENT_OF, grid, make_client_app, quadratics, to_record
from tampering import Tamper, numbers, words

from clients import InProcessGrid
from fl_strategies import FedAvg, FedPD, NothingUsable


def broken(which: Callable[[int, int], bool], silent: Callable[[int, int], bool]) -> Any:
    """Return a fault: ``which`` (client, round) raises, ``silent`` never answers."""

    def fault(request: Message, reply: Message) -> Message | None:
        if request.metadata.message_type != "train":
            return reply
        client = CLIENT_OF[request.metadata.dst_node_id]
        number = int(request.content["config"]["server-round"])  # type: ignore[call-overload]
        if silent(client, number):
            return None
        if which(client, number):
            return Message(Error(2, f"disk {client} of client {client} is full"), reply_to=request)
        return reply

    return fault


def always(client: int, number: int) -> bool:
    return True


def never(client: int, number: int) -> bool:
    return False


@pytest.mark.parametrize("limit", [1, 3, 5])
def test_a_run_in_which_nothing_can_be_used_ends_and_tells_each_cause_once(limit: int) -> None:
    strategy = FedAvg(fraction_evaluate=0.0, local=local(), max_unusable_rounds=limit)
    with pytest.raises(NothingUsable) as error:
        strategy.start(grid(quadratics(3), fault=broken(always, never)), to_record(START), 9)
    assert f"no reply of {limit} rounds in a row was usable: 3 clients" in str(error.value)
    assert str(error.value).count("is full") == 1


def test_a_run_that_needs_a_client_which_always_fails_ends() -> None:
    fault = broken(lambda client, number: client == 1, never)
    told = "3 rounds in a row were skipped, with 2 usable replies at most: client 1: disk 1"
    with pytest.raises(NothingUsable, match=told):
        quiet(FedPD).start(grid(quadratics(3), fault=fault), to_record(START), 9)


def test_different_causes_are_all_told() -> None:
    def fault(request: Message, reply: Message) -> Message:
        client = CLIENT_OF[request.metadata.dst_node_id]
        why = "out of memory" if client == 0 else "no such file"
        return Message(Error(2, why), reply_to=request) if reply.content.array_records else reply

    with pytest.raises(NothingUsable) as error:
        FedAvg(fraction_evaluate=0.0).start(grid(quadratics(3), fault=fault), to_record(START), 9)
    assert "client 0: out of memory" in str(error.value)
    assert "2 clients [1, 2]: no such file" in str(error.value)


UNFINISHED: dict[str, tuple[Any, dict[str, Any]]] = {
    "nobody answers": (broken(never, always), {}),
    "one client of three answers": (broken(always, lambda c, t: c != 1), {}),
    "a usable reply every third round": (broken(lambda c, t: t % 3 > 0, never), {}),
    "one usable reply": (broken(lambda c, t: c > 0, never), {}),
}


@pytest.mark.parametrize(("fault", "options"), UNFINISHED.values(), ids=UNFINISHED)
def test_a_run_goes_on_while_something_may_be_usable(fault: Any, options: dict[str, Any]) -> None:
    strategy = FedAvg(fraction_evaluate=0.0, local=local(), **options)
    strategy.start(grid(quadratics(3), fault=fault), to_record(START), 8)
    assert len(strategy.result.train_metrics_clientapp) == 8


def test_the_only_client_there_is_may_end_a_run() -> None:
    with pytest.raises(NothingUsable, match="usable: client 0: "):
        FedAvg(fraction_evaluate=0.0).start(
            grid(quadratics(1), fault=broken(always, never)), to_record(START), 9
        )


def test_rounds_without_an_answer_neither_count_nor_start_anew() -> None:
    fault = broken(always, lambda client, number: number in (2, 4))
    strategy = FedAvg(fraction_evaluate=0.0, local=local())
    with pytest.raises(NothingUsable, match="3 rounds in a row"):
        strategy.start(grid(quadratics(3), fault=fault), to_record(START), 9)
    assert strategy.result.train_metrics_clientapp.keys() == {
        1,
        2,
        3,
        4,
    }  # the fifth was one too many


@pytest.mark.parametrize("fold", ["off", "on"])
@pytest.mark.parametrize("diverges", [True, False])
def test_an_error_says_whether_the_run_diverged(diverges: bool, fold: str) -> None:
    """Whoever finds it: the server, or a host that folds its clients' uploads."""
    app = make_client_app(quadratics(3), hosts=lambda context: [0, 1, 2])
    host = InProcessGrid(app, 1, fault=None if diverges else broken(always, never))
    strategy = FedAvg(fraction_evaluate=0.0, local=local(lr=1e308), fold=fold)
    with pytest.raises(NothingUsable) as error:
        strategy.start(host, to_record(START), 9)
    assert error.value.diverged == diverges
    assert ("is not finite" in str(error.value)) == diverges


FORGED: dict[str, Tamper] = {
    "a clipping norm of its own": lambda c: numbers(c, {"clipping-norm": 0.0}),
    "wrong checksums": lambda c: words(c, {"checksums": "0 0"}),
    "no examples": lambda c: numbers(c, {"num-examples": 0}),
}


@pytest.mark.parametrize("row", [Row("fedavg"), Row("scaffold"), Row("fedadmm")], ids=str)
@pytest.mark.parametrize("forge", [*FORGED.values(), None], ids=[*FORGED, "an error"])
def test_no_client_that_is_asked_alone_ends_a_run(row: Row, forge: Tamper | None) -> None:
    """In the first rounds, before anything was acknowledged."""

    def fault(request: Message, reply: Message) -> Message:
        if CLIENT_OF[request.metadata.dst_node_id] != 0 or not reply.content.array_records:
            return reply
        if forge is None:
            return Message(Error(2, "made up"), reply_to=request)
        forge(reply.content)
        return reply

    federation = grid(quadratics(2), fault=fault)
    strategy = row.strategy(fraction_train=0.5, local=local(), seed=3)
    strategy.start(federation, to_record(START), 6)
    assert len(strategy.result.train_metrics_clientapp) == 6
