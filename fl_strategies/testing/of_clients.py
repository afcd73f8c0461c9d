"""The laws of a client, each a function of what is checked that states the law."""

from __future__ import annotations

import copy
import functools
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, cast

import numpy as np
from flwr.app import Array, ArrayRecord, Context, Message
from flwr.serverapp.strategy import Strategy

from fl_strategies import STRATEGIES, FedAvg
from fl_strategies.core.randomness import stream
from fl_strategies.core.schedules import check, require
from fl_strategies.messages.one_process import become_server, node_ids
from fl_strategies.testing.federation import (
    Work,
    answered,
    arrays_of,
    fresh,
    snapshot,
)
from fl_strategies.testing.of_strategies import (
    Run,
    Subject,
    late_replies,
    lost_replies,
)
from fl_strategies.testing.verdicts import (
    Finding,
    NotApplicable,
    expect,
    expect_finite,
    expect_same,
    findings_of,
    seeded,
)

if TYPE_CHECKING:
    from flwr.client import NumPyClient

ROUNDS = 6
OWN = 61803
"""A seed that no client sets."""
ClientFn = Callable[[Context], "NumPyClient"]


@dataclass(frozen=True)
class ClientSubject(Subject):
    """What a law of clients is stated on: the maker of clients, and a strategy that asks them."""

    client_fn: ClientFn

    def context(self, client: int = 0) -> Context:
        """Return the context of a client that has never taken part."""
        return fresh(node_ids(self.clients)[client], client, self.clients)

    @functools.cached_property
    def once(self) -> Run:
        """A run of one round."""
        return self.run(rounds=1)

    def trainings(self, **options: Any) -> list[Work]:
        """Return what was asked and replied in a run."""
        run = self.run(**options) if options else self.plain
        return run.federation.done("train")

    def reply(self, request: Message, context: Context) -> Message:
        """Return a client's reply; raise ``AssertionError`` if it is an error."""
        reply = answered(self.app, request, context)
        reason = reply.error.reason if reply.has_error() else ""
        expect(not reason, f"a {request.metadata.message_type} request ended with {reason}")
        return reply

    def first_requests(self) -> dict[int, Message]:
        """Return the first request to train that each client got."""
        requests = self.once.federation.requests
        expect(0 in requests, f"client 0 is not among those asked, {[*requests]}")
        return requests

    def client_and_request(self) -> tuple[NumPyClient, list[np.ndarray], dict[str, Any]]:
        """Return client 0, and what its ``fit`` gets at first: own arrays, and the config."""
        from clients.node.records import make_client

        request = self.first_requests()[0].content
        (record,) = request.array_records.values()
        config = dict(next(iter(request.config_records.values())))
        context = self.context()
        client, config = acting(make_client(self.client_fn, context), config)
        return client, [array.copy() for array in arrays_of(record).values()], config


def acting(client: NumPyClient, config: dict[str, Any]) -> tuple[NumPyClient, dict[str, Any]]:
    """Return the client that does what a request asks of ``client``, and the request."""
    from clients import AnyAlgorithmClient

    if isinstance(client, AnyAlgorithmClient):
        client, told = client.acting(config)
        return client, dict(told)
    return client, config


def fitted(client: NumPyClient, arrays: Any, config: Any) -> Any:
    """Return what ``fit`` returns; raise ``AssertionError`` if it raises an exception."""
    try:
        return client.fit(arrays, config)
    except Exception as error:
        raise AssertionError(f"fit ended with {type(error).__name__}: {error}") from error


def expect_same_replies(
    found: Sequence[Work], expected: Sequence[Work], what: str, other: str
) -> None:
    """Raise ``AssertionError`` unless the clients uploaded the same, to the bit."""
    asked, before = ([(one.phase, one.client) for one in work] for work in (found, expected))
    expect(asked == before, f"(round, client) of the replies are {asked} {what}, {before} {other}")
    for one, two in zip(found, expected, strict=True):
        whose = f"in client {one.client}'s reply {one.phase}"
        expect_same(one.held.arrays, two.held.arrays, f"{whose} {what}", other)


def trains(subject: ClientSubject) -> None:
    """Training answers with other arrays than it received."""
    for one in subject.once.federation.done("train"):
        received = snapshot(one.request.content).arrays.values()
        same = all(map(np.array_equal, one.held.arrays.values(), received))
        expect(not same, f"client {one.client} uploads the arrays that it received")


def form(subject: ClientSubject) -> None:
    """An upload has the names, shapes and types of the received arrays and finite numbers.

    ``num-examples`` is a number above 0.
    """
    for one in subject.once.federation.done("train"):
        (record,) = one.request.content.array_records.values()
        (upload,) = one.reply.content.array_records.values()
        expect_same(
            {name: np.zeros_like(array) for name, array in arrays_of(upload).items()},
            {name: np.zeros_like(array) for name, array in arrays_of(record).items()},
            f"in the upload of client {one.client}",
            "in its request",
        )
        expect_finite(arrays_of(upload), f"in the upload of client {one.client}")
        samples = one.held.others["metrics/num-examples"]
        expect(cast(float, samples) > 0, f"num-examples is {samples}, which must be above 0")


def same_request(subject: ClientSubject) -> None:
    """The same requests get the same replies, to the bit.

    Python's, NumPy's and PyTorch's global generators begin both runs in the same state.
    """
    first, second = subject.trainings(), subject.trainings(seed=0)
    expect_same_replies(second, first, "in the second run", "in the first")


def global_generators(subject: ClientSubject) -> None:
    """Replies do not depend on the state of the process's global generators."""
    first, second = subject.trainings(), subject.trainings(seed=1)
    expect_same_replies(second, first, "if the generators begin with seed 1", "with seed 0")


def leaves_generators(subject: ClientSubject) -> None:
    """Training leaves the process's global generators as they were: other clients share them."""
    request = subject.first_requests()[0]
    with seeded(OWN):
        subject.client_fn(subject.context())  # which may draw, for a model
        before = draws()
    with seeded(OWN):
        subject.reply(request, subject.context())
        after = draws()
    for name, value in before.items():
        expect(
            after[name] == value,
            f"the next draw of {name} is {after[name]} after training, {value} without it",
        )


def draws() -> dict[str, float]:
    """Return the next number of each global generator."""
    import torch

    return {
        "random": random.random(),
        "numpy": float(np.random.random()),  # noqa: NPY002  # it is what is checked
        "torch": float(torch.rand(())),
    }


def received_arrays(subject: ClientSubject) -> None:
    """``fit`` does not write into the arrays and the config that it receives."""
    client, arrays, config = subject.client_and_request()
    before, told = [array.copy() for array in arrays], dict(config)
    fitted(client, arrays, config)
    for number, (now, old) in enumerate(zip(arrays, before, strict=True)):
        name = f"array {number}"
        expect_same({name: now}, {name: old}, "among those received, after fit", "before")
    expect(config == told, f"the config is {config} after fit, {told} before")


def other_clients(subject: ClientSubject) -> None:
    """A client's reply does not depend on which clients this process ran before."""
    requests = subject.first_requests()
    alone = snapshot(subject.reply(requests[0], subject.context()).content).arrays
    for client, request in requests.items():
        subject.reply(request, subject.context(client))
    after = snapshot(subject.reply(requests[0], subject.context()).content).arrays
    expect_same(after, alone, "after other clients' work", "before it")


def one_object(subject: ClientSubject) -> None:
    """What a client remembers is in its store, not in the object.

    An object that lasts a whole run replies as new objects do, one for each request.
    """
    from clients import client_app

    made: dict[int, NumPyClient] = {}

    def remembered(context: Context) -> NumPyClient:
        return made.setdefault(context.node_id, subject.client_fn(context))

    lasting = replace(subject, app=client_app(remembered)).trainings()
    expect_same_replies(lasting, subject.trainings(), "of one object", "of a new one a request")


def one_sample(subject: ClientSubject) -> None:
    """A client with one sample takes part: its upload is finite."""
    from clients import FederatedClient, Problem

    client, arrays, config = subject.client_and_request()
    problem = getattr(client, "problem", None)
    if not isinstance(client, FederatedClient) or not isinstance(problem, Problem):
        raise NotApplicable("its samples cannot be taken away: it has no Problem")
    small = copy.copy(client)
    inputs, targets, _ = next(problem.data.batches(stream(0, "one sample"), 1))
    small.problem = Problem(problem.model, problem.loss, inputs, targets)
    upload, samples, _ = fitted(small, arrays, config)
    expect(samples == 1, f"num-examples is {samples} of a client with 1 sample")
    expect_finite({f"array {n}": a for n, a in enumerate(upload)}, "in the upload")


def evaluation(subject: ClientSubject) -> None:
    """Evaluation answers with a finite loss, and changes no later reply."""
    from flwr.client import NumPyClient

    client, *_ = subject.client_and_request()
    if type(client).evaluate is NumPyClient.evaluate or getattr(client, "test", "own") is None:
        raise NotApplicable("it does not evaluate")
    for one in subject.plain.federation.done("evaluate"):
        loss = one.held.others["metrics/eval-loss"]
        expect(bool(np.isfinite(cast(float, loss))), f"client {one.client}'s loss is {loss}")
    without = subject.federation(lambda kind, *_: "unreached" if kind == "evaluate" else "")
    expect_same_replies(
        subject.trainings(), subject.trainings(on=without), "if clients evaluate", "if they do not"
    )


def personalized_model(subject: ClientSubject) -> None:
    """A client with a personalized model also evaluates it: its ``own-loss`` is finite."""
    from clients import FederatedClient

    client, *_ = subject.client_and_request()
    if not isinstance(client, FederatedClient) or (
        client.personalized_model is FederatedClient.personalized_model
    ):
        raise NotApplicable("it has no personalized model")
    if client.test is None:
        raise NotApplicable("it does not evaluate")
    for one in subject.plain.federation.done("evaluate"):
        loss = one.held.others.get("metrics/own-loss", "missing")
        met = loss != "missing" and bool(np.isfinite(cast(float, loss)))
        expect(met, f"own-loss of client {one.client} is {loss} in round {one.phase}")


CLIENT_LAWS: tuple[Callable[[ClientSubject], None], ...] = (
    trains,
    form,
    same_request,
    global_generators,
    leaves_generators,
    received_arrays,
    other_clients,
    one_object,
    lost_replies,
    late_replies,
    one_sample,
    evaluation,
    personalized_model,
)
"""The laws of a client, for ``check_client(..., laws=[...])`` and for pytest's parameters."""


def check_client(
    make: ClientFn,
    *,
    initial: ArrayRecord | None = None,
    strategy: Callable[[], Strategy] | None = None,
    clients: int = 3,
    laws: Sequence[Callable[[ClientSubject], None]] | None = None,
    on_fail: str = "raise",
) -> list[Finding]:
    """Check the laws that every client behind :func:`clients.client_app` owes its server.

    Parameters
    ----------
    make : callable
        ``make(context)`` returns the NumPyClient of a node, as for ``client_app``. The contexts
        have ``partition-id`` 0, 1, ... It must keep what it keeps in the context's state
        (``ContextStore(context)``).
    initial : ArrayRecord, optional
        The initial model; by default what ``get_parameters`` of client 0 returns.
    strategy : callable, optional
        Returns a new strategy that asks the clients. By default the one of the client's
        ``algorithm``, with its default hyperparameters; FedAvg if it has none.
    clients : int >= 1 (default 3)
        How many clients there are.
    laws : sequence of functions, optional
        Those to check; by default ``CLIENT_LAWS``.
    on_fail : "raise" or "report" (default "raise")

    Returns
    -------
    list of Finding
        One of each law.

    Raises
    ------
    AssertionError
        For the first law that is broken, with its name and the two values that differ; never with
        ``on_fail="report"``.
    ValueError
        For an argument outside its range, or without an initial model.
    """
    from clients import client_app

    check("clients", clients, low=1, integer=True)
    require(callable(make), "make", "a function of the context that returns a NumPyClient", make)
    become_server()
    first = make(fresh(node_ids(1)[0], 0, clients))
    if strategy is None:
        strategy = STRATEGIES.get(getattr(first, "algorithm", "fedavg"), FedAvg)
    if initial is None:
        arrays = first.get_parameters({})
        names = getattr(first, "array_names", [str(number) for number in range(len(arrays))])
        require(len(arrays) > 0, "initial", "given, as get_parameters returns no arrays", initial)
        initial = ArrayRecord(
            {name: Array(np.array(array)) for name, array in zip(names, arrays, strict=True)}
        )
    subject = ClientSubject(strategy, client_app(make), initial, clients, ROUNDS, make)
    return findings_of(CLIENT_LAWS if laws is None else laws, subject, on_fail)
