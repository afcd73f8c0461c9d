"""Settling a run's layout before its first round: which arrays travel, are trained, are tied.

    given options > a checkpoint or an earlier call > clients' descriptions > PyTorch's conventions

The initial model is all of ``module.state_dict()``. What clients do not share (frozen arrays, which
nobody trains, and each client's own) stays on the server as it is. At most :data:`MOST_ASKED`
connected clients describe their models; most of them decide, and the log names the others. A client
that knows no descriptions, as one written for Flower's own strategies, loads and sends all arrays.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from logging import INFO, WARNING
from typing import Any, NamedTuple

from flwr.app import ConfigRecord, Message, RecordDict
from flwr.serverapp import Grid

from fl_strategies.core.layout import Arrays, Layout, conventional_buffers, few
from fl_strategies.core.log import log
from fl_strategies.core.reasons import by_reason, named
from fl_strategies.core.records import BadReply
from fl_strategies.messages.description import (
    DESCRIBE,
    DESCRIPTION,
    QUERY,
    WHOSE,
    Description,
    digest,
    type_and_shape,
)
from fl_strategies.messages.wire import Failed
from fl_strategies.server.nodes import ANY_HOST, Nodes, answers_no_query
from fl_strategies.server.options import Options
from fl_strategies.server.replies import is_reply_to, one_line, reason_of
from fl_strategies.server.waiting import ask

MOST_ASKED = 5
"""The most clients that are asked to describe their models."""


class Roles(NamedTuple):
    """The names of the arrays that travel, and the roles of arrays, as in :class:`.Layout`."""

    shared: tuple[str, ...]
    buffers: tuple[str, ...] = ()
    ties: tuple[tuple[str, ...], ...] = ()
    frozen: tuple[tuple[str, str], ...] = ()
    """Names and digests of the frozen arrays."""

    @classmethod
    def of(cls, layout: Layout) -> Roles:
        """Return the roles of a settled layout."""
        frozen = tuple(sorted(layout.frozen.items()))
        return cls(tuple(layout.shapes), tuple(layout.untrained), layout.ties, frozen)

    @classmethod
    def saved(cls, fields: Mapping[str, Any]) -> Roles:
        """Return the roles whose ``_asdict()`` a checkpoint holds."""
        ties, frozen = ([tuple(item) for item in fields[name]] for name in ("ties", "frozen"))
        return cls(tuple(fields["shared"]), tuple(fields["buffers"]), tuple(ties), tuple(frozen))

    def layout(self, arrays: Arrays) -> Layout:
        """Return the layout of ``arrays``; raise ``ValueError`` if they cannot have these roles."""
        names = {*self.shared}
        shared = {name: array for name, array in arrays.items() if name in names}
        return Layout.of(shared, self.buffers, self.ties, dict(self.frozen))


def settled(
    options: Options,
    arrays: Arrays,
    before: Roles | None,
    describe: Callable[[], Mapping[int, Description | None]],
) -> Layout:
    """Return the layout of the model with ``arrays``, for a strategy's ``options``.

    ``before`` are the roles of a checkpoint or an earlier call, if there is one; ``describe`` asks
    clients. Raises ``ValueError`` for options or clients that contradict the model.
    """
    frozen = options.frozen
    options_of: dict[str, Any] = {
        "buffers": options.buffers,
        "ties": options.ties,
        "frozen": None if frozen is None else tuple(sorted(frozen.items())),
    }
    given = {name: value for name, value in options_of.items() if value is not None}
    roles = before
    if roles is None or not {*roles.shared} <= arrays.keys():
        roles = None if len(given) == 3 else decided(describe(), arrays)
    if roles is None:
        buffers = tuple(conventional_buffers(arrays))
        roles = Roles(tuple(arrays), buffers)
        if buffers and "buffers" not in given:
            log(INFO, "buffers, which no client trains, by PyTorch's names: %s", few(buffers))
    if frozen:
        if others := [n for n, d in frozen.items() if n in arrays and digest(arrays[n]) != d]:
            raise ValueError(f"frozen: {few(others)} of the initial model have other digests")
        roles = roles._replace(shared=tuple(n for n in roles.shared if n not in frozen))
    return roles._replace(**given).layout(arrays)


# ---- asking -------------------------------------------------------------------------------------


def descriptions(nodes: Nodes, grid: Grid, needed: int) -> dict[int, Description | None]:
    """Return what a few clients say of their models, None of those that know no descriptions.

    They are the connected clients of the lowest ids, of a host one, once ``needed`` are connected.
    """
    connected = nodes.wait(grid, needed)
    asked: dict[int, tuple[int, Message]] = {}
    for client, node in _few_of(nodes, connected):
        whose = {WHOSE: client} if node in nodes.hosts else {}
        content = RecordDict({DESCRIBE: ConfigRecord({DESCRIBE: True, **whose})})
        asked[node] = client, Message(content, dst_node_id=node, message_type=QUERY)
    found: dict[int, Description | None] = {}
    faults: dict[int, BadReply] = {}
    silent = {client for client, _ in asked.values()}
    queries = [query for _, query in asked.values()]
    for reply in ask(grid, queries, nodes.patience):
        client, query = asked.get(reply.metadata.src_node_id, (0, None))
        if query is None or client not in silent or not is_reply_to(reply, query.metadata):
            continue
        silent.remove(client)
        try:
            found[client] = _read(reply)
        except BadReply as fault:
            faults[client] = fault
    faults |= dict.fromkeys(silent, Failed("none came"))
    for kind, level in ((Failed, INFO), (BadReply, WARNING)):  # errors that last stop training
        reasons = {c: one_line(str(fault)) for c, fault in faults.items() if type(fault) is kind}
        for reason, clients in by_reason(reasons.items()).items():
            log(level, "no description of the model from %s: %s", named(clients), reason)
    return dict(sorted(found.items()))


def _few_of(nodes: Nodes, connected: Mapping[int, int]) -> Iterator[tuple[int, int]]:
    """Yield the clients to ask, and their nodes, each node once."""
    shared = iter(sorted(node for node, any_client in nodes.hosts.items() if any_client))
    asked: set[int] = set()
    for client in sorted(connected):
        node = connected[client]
        if node == ANY_HOST:
            node = next(shared, ANY_HOST)
        if node != ANY_HOST and node not in asked:
            asked.add(node)
            yield client, node
        if len(asked) == MOST_ASKED:
            return


def _read(reply: Message) -> Description | None:
    """Return the description in a reply; raise :class:`BadReply` if it cannot be read."""
    if not reply.has_content():
        reason = reason_of(reply) if reply.has_error() else "no content"
        if answers_no_query(reason):
            return None
        raise Failed(reason)
    answers = [about for about in reply.content.config_records.values() if DESCRIPTION in about]
    return Description.of(answers[0][DESCRIPTION]) if answers else None


# ---- deciding -----------------------------------------------------------------------------------


def decided(descriptions: Mapping[int, Description | None], arrays: Arrays) -> Roles | None:
    """Return the roles that most descriptions give ``arrays``; None if there are no descriptions.

    Raises ``ValueError`` if no client's model is the initial one, or if as many clients load all
    arrays as share only some of them.
    """
    votes: dict[int, Roles] = {}
    wrong: list[str] = []
    for client, description in descriptions.items():
        try:
            if description is not None:
                votes[client] = roles_in(description, arrays)
        except ValueError as fault:
            why = one_line(str(fault))
            wrong.append(f"{named([client])} cannot train the initial model: {why}")
    if wrong and len(wrong) == len(descriptions):
        raise ValueError(wrong[0])
    for said in wrong:
        log(WARNING, "%s", said)
    if not votes:
        return None
    roles, _ = Counter(votes.values()).most_common(1)[0]
    voters = [client for client in votes if votes[client] == roles]
    others = [client for client in votes if votes[client] != roles]
    stay = sorted(arrays.keys() - {*roles.shared}) or [name for name, _ in roles.frozen]
    whole = [client for client, description in descriptions.items() if description is None]
    if stay and whole:
        kinds = (
            f"{named(whole)}, which load all arrays, and {named(voters)}, which do not share"
            f" {few(stay)}"
        )
        if len(whole) == len(voters):
            raise ValueError(f"a run needs clients of one kind; there are {kinds}")
        log(WARNING, "replies of the smaller group will be refused: there are %s", kinds)
        if len(whole) > len(voters):
            return None
    if others:
        log(WARNING, "another model than %s: %s", named(voters), named(others))
    roles_of = {
        "buffers": roles.buffers,
        "tied": roles.ties,
        "not shared, and unchanged on the server,": stay,
    }
    if parts := [f"{role} {few(names)}" for role, names in roles_of.items() if names]:
        log(INFO, "by descriptions of %s: %s", named(voters), "; ".join(parts))
    return roles


def roles_in(description: Description, arrays: Arrays) -> Roles:
    """Return the roles that ``description`` gives ``arrays``, the initial model's.

    Arrays named by numbers, as a legacy server's, are told by their places. The digests of frozen
    arrays are those of the initial model, if it has these arrays. Raises ``ValueError`` if the
    initial model cannot be the one described.
    """
    names, shared = list(arrays), dict.fromkeys(description.shared)
    place = {name: name for name in description.arrays if name in arrays}
    if all(name.isdecimal() for name in names):
        for described in (description.arrays, shared):
            if len(described) == len(names):
                place = dict(zip(described, names, strict=True))
    if missing := [name for name in shared if name not in place]:
        raise BadReply(f"the initial model lacks {few(missing)}")
    if unknown := [*arrays.keys() - place.values()]:
        raise BadReply(f"it lacks {few(sorted(unknown))} of the initial model")
    for name, theirs in description.kinds.items():
        array = arrays[place[name]] if name in place else None
        if array is not None and theirs != (ours := type_and_shape(array.dtype, array.shape)):
            raise BadReply(f"its {name} is {theirs}, that of the initial model {ours}")
    roles = Roles(
        tuple(map(place.__getitem__, shared)),
        tuple(place[name] for name in description.buffers if name in shared),
        tuple(tuple(place[name] for name in group if name in place) for group in description.ties),
        tuple(
            (name, digest(arrays[place[name]]) if name in place else claimed)
            for name, claimed in description.frozen.items()
        ),
    )
    return Roles.of(roles.layout(arrays))
