"""Any NumPyClient behind Flower's Message API, and behind the legacy one."""

from __future__ import annotations

from collections.abc import Callable
from logging import DEBUG
from typing import Any

from flwr.app import (
    ArrayRecord,
    ConfigRecord,
    Context,
    Message,
    MessageType,
    MetricRecord,
    RecordDict,
)
from flwr.client import NumPyClient
from flwr.clientapp import ClientApp
from flwr.clientapp.mod import (
    LocalDpMod,
    adaptiveclipping_mod,
    fixedclipping_mod,
)
from flwr.clientapp.typing import ClientAppCallable, Mod

from clients.any_algorithm import Registered, register, registered
from clients.learning.replay import kept_generators
from clients.node.host import Host, Hosted, Hosts
from clients.node.records import (
    ClientFn,
    check_id,
    check_names,
    described,
    divided,
    log_failure,
    make_client,
)
from clients.node.state import client_id
from clients.stacking.choice import Setting, check_setting
from fl_strategies.core.log import log
from fl_strategies.core.reasons import brief, of_exception
from fl_strategies.core.schedules import require
from fl_strategies.messages.codes import received
from fl_strategies.messages.description import DESCRIBE, QUERY, WHOSE
from fl_strategies.messages.encoding import recorded
from fl_strategies.messages.hosting import is_hosted
from fl_strategies.messages.one_process import error_reply
from fl_strategies.messages.wire import Content

ARRAYS, CONFIG, METRICS, CLIENT = "arrays", "config", "metrics", "client"


def _named(context: Context) -> object:
    """Return :func:`client_id` for a person, or the ``partition-id`` that makes none."""
    return context.node_config.get("partition-id", brief(context.node_id))


def client_app(
    client_fn: ClientFn,
    mods: list[Mod] | None = None,
    *,
    hosts: Hosts | Callable[[Context], Hosts] = None,
    stack: Setting | Callable[[Context], Setting] = "off",
) -> ClientApp:
    """Return a ClientApp that answers train, evaluate and query messages by a NumPyClient.

    Parameters
    ----------
    client_fn : callable
        ``client_fn(context)`` returns the NumPyClient of this node. A client of this package
        without a ``client_id`` or ``store`` gets the context's; one with another ``client_id`` than
        the context's ``partition-id`` is refused.
    mods : list, optional
        Flower mods around train and evaluate. Mods that clip or add noise act on training only,
        as Flower documents them.
    hosts : sequence of int, int, or function of the context that returns one, optional
        Makes the node a host (:mod:`clients.node.host`). A sequence holds the ids of its clients:
        a hospital group, a gateway with several data owners. A number N stands for any of the
        clients 0, ..., N - 1: the strategy then has ``shared_population=N``, and all hosts reach
        all states (``DirectoryStore``). With None, the node is one client. ``client_fn`` gets a
        context of the client: its id as ``partition-id``, and its own state.
    stack : "off", "auto", int >= 2, or function of the context that returns one (default "off")
        How many clients of a host are trained at once, as a stack (:mod:`clients.stacking`).

    Texts and bytes among a client's metrics travel in a ConfigRecord, numbers in the MetricRecord
    (with ``num-examples``, and ``evaluate``'s loss as ``eval-loss``). The answer to a query holds
    ``client-id`` and ``num-partitions``; the query "describe" asks a client to describe its model.
    The same app also answers a legacy ``Server``. A host
    does not; a host also refuses mods that clip, add noise or aggregate securely, because its
    messages are about several clients.

    After an exception the node answers with Flower's error, whose reason is one line, the innermost
    exception first. With ``FLWR_LOG_LEVEL=DEBUG`` the client's own log shows the traceback.
    """
    require(callable(client_fn), "client_fn", "a function of the context", client_fn)
    return _BridgedApp(client_fn, mods, hosts, stack)


def _arrived(algorithms: Registered, *given: Any) -> ClientApp:
    register(algorithms)
    return _BridgedApp(*given)


class _BridgedApp(ClientApp):
    def __init__(
        self,
        client_fn: ClientFn,
        mods: list[Mod] | None,
        hosts: Hosts | Callable[[Context], Hosts],
        stack: Setting | Callable[[Context], Setting],
    ) -> None:
        super().__init__()
        self._given = client_fn, mods, hosts, stack
        self._client_fn, self._hosts, self._stack = client_fn, hosts, stack
        if not callable(stack):
            check_setting(stack)
        own = [mod for mod in mods or [] if changes_uploads(mod) or masks(mod)]
        self._one_each = [getattr(mod, "__name__", type(mod).__name__) for mod in own]
        mods = [_for_training(mod) if changes_uploads(mod) else mod for mod in mods or []]
        self._legacy = ClientApp(lambda context: make_client(client_fn, context).to_client(), mods)

        @self.train(mods=mods)
        def train(message: Message, context: Context) -> Message:
            if host := self._host(context):
                return Message(host.train(message, context), reply_to=message)
            client = check_id(make_client(client_fn, context), context)
            names, arrays, config = request_of(message, client)
            trained, samples, metrics = client.fit(arrays, config)
            if len(trained) != len(names):
                raise ValueError(f"fit returned {len(trained)} arrays, {len(names)} were received")
            record = recorded(dict(zip(names, trained, strict=True)))
            return _reply(message, divided(samples, metrics, config), record)

        @self.evaluate(mods=mods)
        def evaluate(message: Message, context: Context) -> Message:
            if host := self._host(context):
                return Message(host.evaluate(message, context), reply_to=message)
            client = check_id(make_client(client_fn, context), context)
            _, arrays, config = request_of(message, client)
            loss, samples, metrics = client.evaluate(arrays, config)
            told = divided(samples, {"eval-loss": loss, **metrics}, config)
            return _reply(message, told)

        @self.query()
        def query(message: Message, context: Context) -> Message:
            host = self._host(context)
            about: dict[str, Any] = host.about if host else {"client-id": client_id(context)}
            about["num-partitions"] = int(context.node_config.get("num-partitions", 0))
            return Message(RecordDict({CLIENT: ConfigRecord(about)}), reply_to=message)

        @self.query(DESCRIBE)
        def describe(message: Message, context: Context) -> Message:
            config: dict[str, Any] = dict(message.content.config_records[DESCRIBE])
            with kept_generators([]):
                if host := self._host(context):
                    about = host.describe(config[WHOSE], context)
                else:
                    about = described(check_id(make_client(client_fn, context), context))
            return Message(RecordDict({CLIENT: ConfigRecord(about)}), reply_to=message)

    def __reduce__(self) -> Any:  # for other processes
        return _arrived, (registered(), *self._given)

    def __call__(self, message: Message, context: Context) -> Message:
        kind = message.metadata.message_type
        legacy = kind in ("get_parameters", "get_properties", "reconnect") or (
            message.has_content()
            and any(key.startswith(("fitins.", "evaluateins.")) for key in message.content)
        )
        try:
            self._check_host(message, context, legacy=legacy)
            return self._legacy(message, context) if legacy else super().__call__(message, context)
        except Exception as error:
            reason = of_exception(error)
            if kind != QUERY:  # training will fail for the same reason
                log_failure(f"client {_named(context)}", reason)
            log(DEBUG, "client %s failed", _named(context), exc_info=error)
            return error_reply(message, reason)

    def _host(self, context: Context) -> Host | None:
        """Return the host that answers for the node's clients; None if the node is one client."""
        hosts = self._hosts(context) if callable(self._hosts) else self._hosts
        if hosts is None:
            return None
        stack = self._stack(context) if callable(self._stack) else self._stack
        clients, samples = hosts if isinstance(hosts, Hosted) else (hosts, ())
        return Host(self._client_fn, clients, samples, stack)

    def _check_host(self, message: Message, context: Context, *, legacy: bool) -> None:
        """Raise ``ValueError`` if a host is asked for one client."""
        if self._host(context) is None:
            return
        if self._one_each:
            raise ValueError(
                f"{self._one_each} change one client's upload, and this node hosts several, whose"
                " uploads travel in one message: give each client a node of its own"
            )
        trains = message.metadata.message_type in (MessageType.TRAIN, MessageType.EVALUATE)
        if legacy or (trains and not is_hosted(message.content)):
            raise ValueError(
                "this node hosts several clients, and the request is about one, as those of a"
                " legacy server and of Flower's own strategies: give each client a node of its own,"
                " or use a strategy of fl_strategies"
            )


def changes_uploads(mod: Mod) -> bool:
    """Return whether a mod clips uploads or adds noise to them."""
    return mod in (fixedclipping_mod, adaptiveclipping_mod) or isinstance(mod, LocalDpMod)


def masks(mod: Mod) -> bool:
    """Return whether a mod masks uploads, for secure aggregation."""
    return getattr(mod, "__name__", "").startswith("secagg")


def _for_training(mod: Mod) -> Mod:
    """Return ``mod`` for training messages only: Flower's mods refuse all others."""

    def around(message: Message, context: Context, call_next: ClientAppCallable) -> Message:
        if message.metadata.message_type != MessageType.TRAIN:
            return call_next(message, context)
        return mod(message, context, call_next)

    return around


def request_of(
    message: Message, client: NumPyClient
) -> tuple[list[str], list[Any], dict[str, Any]]:
    """Return the names and arrays of the ArrayRecord, and the ConfigRecord as a new dict.

    The arrays are read-only views of the received ones, unless they came as bfloat16. If the client
    knows the names of its model's arrays (``array_names``, as clients of this package do), the
    record must begin with them.
    """
    _, configs, arrays, _ = Content.of(message.content)
    if len(arrays) != 1 or len(configs) > 1:
        raise ValueError(
            "a request holds one ArrayRecord and at most one ConfigRecord, got"
            f" {len(arrays)} and {len(configs)}"
        )
    (record,) = arrays.values()
    names = [*record]
    config = {name: value for told in configs.values() for name, value in told.items()}
    check_names(client, names)
    return names, received(record, config), config


def _reply(
    message: Message,
    told: tuple[dict[str, Any], dict[str, Any]],
    arrays: ArrayRecord | None = None,
) -> Message:
    numbers, words = told
    content = RecordDict({METRICS: MetricRecord(numbers)})
    if arrays is not None:
        content[ARRAYS] = arrays
    if words:
        content[CONFIG] = ConfigRecord(words)
    return Message(content, reply_to=message)
