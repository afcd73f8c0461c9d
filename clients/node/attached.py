"""An app with ``@app.train`` of its user's, for any algorithm: Flower's ClientApp with a mod.

    from clients import ClientApp, attach      # in place of Flower's ClientApp

    @app.train()
    def train(msg, context):
        model = Net()
        model.load_state_dict(msg.content["arrays"].to_torch_state_dict())
        attach(model)
        ...

The functions, their data, metrics and messages stay as they are. Around them acts what acts around
a ``NumPyClient`` (``clients.base``): the algorithm's rule, its state, its codec.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping, Sequence
from contextvars import ContextVar
from typing import Any, TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from flwr import clientapp
from flwr.app import (
    ArrayRecord,
    ConfigRecord,
    Context,
    Message,
    MetricRecord,
    RecordDict,
)
from flwr.clientapp.typing import ClientAppCallable, Mod
from torch import nn

from clients.any_algorithm import AnyAlgorithmClient, client_of, register, registered
from clients.base import MAX_STEPS
from clients.learning.border import Border, check_unchanged
from clients.learning.local_problem import Metrics
from clients.learning.own import COUNT, OwnEvaluation, OwnTraining
from clients.learning.terms import Terms
from clients.node.bridge import (
    CLIENT,
    CONFIG,
    METRICS,
    changes_uploads,
    masks,
    request_of,
)
from clients.node.records import divided
from clients.node.state import ContextStore, Store, client_id
from fl_strategies import STRATEGIES
from fl_strategies.core.layout import conventional_buffers, few
from fl_strategies.core.log import log_once
from fl_strategies.core.schedules import require
from fl_strategies.messages.codes import received
from fl_strategies.messages.description import DESCRIBE, DESCRIPTION, QUERY
from fl_strategies.messages.encoding import recorded
from fl_strategies.messages.hosting import is_hosted

DEFAULT = "default"
"""Flower's name for the action of a function without one: what our requests ask for."""
WRAPPERS = {"module", "_orig_mod", "_module"}
"""What ``DataParallel``, ``torch.compile`` and Opacus add to the names of parameters."""
T = TypeVar("T")
Factory: TypeAlias = Callable[[], nn.Module | Border]
Arrays: TypeAlias = Mapping[str, npt.NDArray[Any]]


class ClientApp(clientapp.ClientApp):
    """Flower's ClientApp whose ``@app.train()`` and ``@app.evaluate()`` serve our algorithms.

    A request that names no algorithm, as those of Flower's own strategies, and other actions
    (``@app.train("x")``) reach the functions untouched. Each node is one client; it answers the
    server's queries for its stable id and its model.

    In a request of ours the functions get the model to start from, and the request's config with a
    ``seed`` of the run, the round and the client, by which torch's, NumPy's and random's
    generators are seeded, too, as for an evaluation. Some rules train several times for a request,
    or a part of the model at a time: then ``attach`` freezes the rest, and ``epochs`` are that
    part's. The reply has the function's metrics and the algorithm's numbers; its arrays are what
    the algorithm uploads.

    Parameters
    ----------
    mods : list, optional
        As of Flower's ClientApp: these act outside of the algorithm, on what it uploads, and those
        of ``@app.train(mods=...)`` inside, on each training. Mods that clip, add noise or
        aggregate securely are refused where the algorithm uploads changes.
    store : callable, optional
        ``store(context)`` returns where the client keeps its state, by default its
        ``ContextStore``.
    model : callable, optional
        Returns a module like the one that the functions train, or its :class:`.Border`. It tells
        which arrays are tied, frozen or not trained. Without it PyTorch's conventions hold: all
        floating-point arrays are trained, except those named as running statistics.
    max_steps : int >= 1 (default 1,000,000)
        The most optimizer steps for one request.
    evaluate_own : bool (default True)
        As of :class:`.OwnTraining`: metrics of the personalized model are called ``own-...``.

    Raises
    ------
    ValueError
        For a legacy ``client_fn``; for a request that the functions cannot serve, before training;
        if the algorithm's terms reached no optimizer step.
    """

    def __init__(
        self,
        client_fn: None = None,
        mods: list[Mod] | None = None,
        *,
        store: Callable[[Context], Store] = ContextStore,
        model: Factory | None = None,
        max_steps: int = MAX_STEPS,
        evaluate_own: bool = True,
    ) -> None:
        if client_fn is not None:
            raise ValueError(
                "client_fn is Flower's legacy form, and this ClientApp is for @app.train: use"
                " client_app(client_fn) with a NumPyClient such as AnyAlgorithmClient(OwnTraining("
                "module, train, num_samples), ...)"
            )
        require(callable(store), "store", "a function of the context", store)
        makes = callable(model) and not isinstance(model, nn.Module | Border)
        require(model is None or makes, "model", "a function that returns it", model)
        super().__init__(mods=mods)
        self._outside, self._own_queries = [*(mods or [])], set[str]()
        self._store, self._model, self._max_steps = store, model, max_steps
        self._evaluate_own = evaluate_own

    def train(self, action: str = DEFAULT, *, mods: list[Mod] | None = None) -> Any:
        """As Flower's, with the algorithm around the function."""
        return super().train(action, mods=self._around(self._trained, action, mods or []))

    def evaluate(self, action: str = DEFAULT, *, mods: list[Mod] | None = None) -> Any:
        """As Flower's; the personalized model is measured, too."""
        return super().evaluate(action, mods=self._around(self._evaluated, action, mods or []))

    def query(self, action: str = DEFAULT, *, mods: list[Mod] | None = None) -> Any:
        """As Flower's; a function of your own for our queries answers them in our place."""
        self._own_queries.add(action)
        return super().query(action, mods=mods)

    def __call__(self, message: Message, context: Context) -> Message:
        """Answer a message."""
        kind = message.metadata.message_type
        if kind == "query" and DEFAULT not in self._own_queries:
            partitions = int(context.node_config.get("num-partitions", 0))
            about: dict[str, Any] = {"client-id": client_id(context), "num-partitions": partitions}
            return Message(RecordDict({CLIENT: ConfigRecord(about)}), reply_to=message)
        if kind == QUERY and DESCRIBE not in self._own_queries:
            about = {DESCRIPTION: self._made().description.to_text()} if self._model else {}
            return Message(RecordDict({CLIENT: ConfigRecord(about)}), reply_to=message)
        return super().__call__(message, context)

    def __getstate__(self) -> Any:
        return registered(), self.__dict__

    def __setstate__(self, state: Any) -> None:
        register(state[0])
        self.__dict__.update(state[1])

    def _around(
        self, handle: Callable[[Request], Message], action: str, inside: list[Mod]
    ) -> list[Mod]:
        """Return the mods around a function: the algorithm, for its requests, and those inside."""

        def algorithm(message: Message, context: Context, call_next: ClientAppCallable) -> Message:
            request = Request(message, context, call_next)
            if "algorithm" not in request.config:
                return call_next(message, context)
            self._check_mods(str(request.config["algorithm"]), inside)
            return handle(request)

        return [algorithm, *inside] if action == DEFAULT else inside

    def _trained(self, request: Request) -> Message:
        problem, client = self._client(request)
        names, arrays, config = request_of(request.message, client)
        uploads, samples, metrics = client.fit(arrays, config)
        record = recorded(dict(zip(names, uploads, strict=True)))
        numbers, words = divided(samples, metrics, config)
        return problem.reply_with({n: v for n, v in numbers.items() if n != COUNT}, words, record)

    def _evaluated(self, request: Request) -> Message:
        problem, client = self._client(request)
        _, arrays, config = request_of(request.message, client)
        _, _, metrics = client.evaluate(arrays, config)
        metrics.pop("own-loss", None)  # the functions name theirs themselves
        numbers, words = divided(0, metrics, config)
        own = {name: value for name, value in numbers.items() if name.startswith("own-")}
        return problem.reply_with(own, words)

    def _client(self, request: Request) -> tuple[Attached, AnyAlgorithmClient]:
        model = self._made() if self._model else Border(StandIn(request.model_arrays))
        problem = Attached(model, request, self._evaluate_own, conventional=self._model is None)
        me, store = client_id(request.context), self._store(request.context)
        return problem, AnyAlgorithmClient(
            problem, client_id=me, store=store, max_steps=self._max_steps
        )

    def _made(self) -> Border:
        assert self._model is not None
        model = self._model()
        return model if isinstance(model, Border) else Border(model)

    def _check_mods(self, algorithm: str, inside: Sequence[Mod]) -> None:
        """Raise ``ValueError`` for mods that would change what they do not understand."""
        strategy = STRATEGIES.get(algorithm)
        models = strategy is not None and strategy.averages != "changes"
        wrong = [mod for mod in inside if masks(mod)]
        if not models:
            acting = [*self._outside, *inside]
            wrong += [mod for mod in acting if changes_uploads(mod) or masks(mod)]
        if wrong:
            name = getattr(wrong[0], "__name__", type(wrong[0]).__name__)
            why = "reads the trained model" if models else "uploads changes, which are recorded"
            raise ValueError(f"{name} would change what {algorithm} {why}: it is refused here")


class Request:
    """A message, its context, and what answers it."""

    def __init__(self, message: Message, context: Context, call_next: ClientAppCallable) -> None:
        self.message, self.context, self._call_next = message, context, call_next
        if is_hosted(message.content):
            raise ValueError("the request is about several clients, and this node is one")
        self.config = dict(next(iter(message.content.config_records.values()), {}))

    @property
    def model_arrays(self) -> Arrays:
        """The arrays of the model, without those of further vectors."""
        client = client_of(str(self.config["algorithm"]))
        further = tuple(f"{name}/" for name in client.extra_vectors)
        record = next(iter(self.message.content.array_records.values()))
        arrays = zip(record, received(record, self.config), strict=True)
        return {name: array for name, array in arrays if not name.startswith(further)}

    def answered(self, arrays: Arrays, config: Mapping[str, Any]) -> Message:
        """Return the user's reply to this request with other arrays and config, without None."""
        message, content = copy.copy(self.message), RecordDict()
        for key, record in self.message.content.items():
            if isinstance(record, ArrayRecord):
                content[key] = recorded(arrays)
            elif isinstance(record, ConfigRecord):
                told = {name: v for name, v in {**record, **config}.items() if v is not None}
                content[key] = ConfigRecord(told)
            else:
                content[key] = copy.copy(record)
        message.content = content
        reply = self._call_next(message, self.context)
        require(isinstance(reply, Message), "what the app's function returns", "a Message", reply)
        if reply.has_error():
            raise ValueError(f"the app's function answered with an error: {reply.error.reason}")
        return reply


class Attached(OwnTraining):
    """A user's functions for messages, where an OwnTraining has functions of a module.

    The border's module stands for the user's: it holds what the user's model begins with, and what
    the reply says that it came to.
    """

    def __init__(
        self, model: Border, request: Request, evaluate_own: bool, *, conventional: bool
    ) -> None:
        super().__init__(model, _not_called, 1, evaluate=_not_called, evaluate_own=evaluate_own)
        self.request, self.conventional = request, conventional
        self._terms: Terms | None = None
        self._fixed_names, self._fixed = list[str](), list[nn.Parameter]()
        self._reply: Message | None = None

    def run(self, terms: Terms, model: Border, config: dict[str, Any], *, aside: bool) -> Any:
        self._terms, self._fixed_names = terms, model.fixed_names
        token = _TRAINED.set(self)
        work = {name: config.get(name) for name in ("seed", "epochs", "steps")}
        try:
            reply = self.request.answered(self._arrays(), work)
        finally:
            _TRAINED.reset(token)
            while self._fixed:
                self._fixed.pop().requires_grad_(True)
        self._take(reply)
        terms.check_ended(self.model.shared)
        self._check_stepped(terms)
        if not aside:
            self._reply = reply
        record: Any = next(iter(reply.content.metric_records.values()), {})
        return {"epochs": record["epochs"]} if "epochs" in record else None

    def evaluation(self, config: Mapping[str, Any]) -> OwnEvaluation:
        return AttachedEvaluation(self, config)

    def measured(self) -> dict[str, Any]:
        """Return the user's metrics of the model as it is."""
        reply = self.request.answered(self._arrays(), {})
        self._reply = self._reply or reply
        return dict(next(iter(reply.content.metric_records.values()), {}))

    def reply_with(
        self,
        numbers: Mapping[str, Any],
        words: Mapping[str, Any],
        arrays: ArrayRecord | None = None,
    ) -> Message:
        """Return the user's reply with the client's numbers and words, and its arrays."""
        assert self._reply is not None
        content = self._reply.content
        key = next(iter(content.metric_records), METRICS)
        own = content.metric_records.get(key, MetricRecord())
        if clash := sorted(numbers.keys() & own.keys() - {"steps", "epochs"}):
            algorithm = str(self.request.config["algorithm"])
            raise ValueError(
                f"the app's function must not report {clash}, which the client of {algorithm}"
                " reports"
            )
        content[key] = MetricRecord({**numbers, **own})
        if words:
            content[CONFIG] = ConfigRecord({**content.config_records.get(CONFIG, {}), **words})
        if arrays is not None:
            content[next(iter(content.array_records))] = arrays
        return self._reply

    def attach(self, model: nn.Module, names: Mapping[str, str] | None) -> None:
        """Give the algorithm's terms to the steps of ``model``'s parameters."""
        assert self._terms is not None
        layout = self.model.layout
        own = dict(model.named_parameters(remove_duplicate=False))
        found = by_name(own, [*layout.trainable], names or {})
        buffers = {_plain(name) for name, _ in model.named_buffers()}
        unknown = [n for n in layout.trainable if n not in found and _plain(n) not in buffers]
        if unknown:
            raise ValueError(
                f"the attached module has no parameters {few(unknown)} of the request, but"
                f" {few([*own])}: attach(model, names={{its name: the request's}}) tells them"
            )
        for name, parameter in found.items():
            if tuple(parameter.shape) != layout.shapes[name]:
                raise ValueError(
                    f"parameter {name!r} of the attached module has shape"
                    f" {tuple(parameter.shape)}, the request's {layout.shapes[name]}"
                )
        for parameter in by_name(own, self._fixed_names, names or {}).values():
            if parameter.requires_grad:
                parameter.requires_grad_(False)
                self._fixed.append(parameter)
        moving = {*found} - {*self._fixed_names}
        parameters = [found[name] if name in moving else None for name in layout.trainable]
        if self.conventional:
            _say_where_wrong(layout.trainable, found)
        once: dict[int, int] = {}
        for place, p in enumerate(parameters):
            if p is not None and once.setdefault(id(p), place) != place:
                parameters[place] = None  # its other name has the same terms
        self._terms.attach(parameters)

    def _check_stepped(self, terms: Terms) -> None:
        """Raise ``ValueError`` if an array changed whose attached parameter no optimizer stepped.

        Another parameter was trained in its place, without the algorithm's terms.
        """
        names, ended = self.model.layout.trainable, self.model.shared
        if changed := [names[place] for place in terms.moved_apart(ended)]:
            raise ValueError(
                f"the reply's arrays {few(changed)} changed, and no optimizer stepped the"
                " parameters that attach(model) saw: call it after the last change of layers"
            )

    def _arrays(self) -> Arrays:
        return self.model.arrays_of([*self.model.tensors()])

    def _take(self, reply: Message) -> None:
        """Put the arrays of a reply into the border's module."""
        records = [*reply.content.array_records.values()]
        if len(records) != 1:
            raise ValueError(f"a reply to train has one ArrayRecord, got {len(records)}")
        arrays = {name: array.numpy() for name, array in records[0].items()}
        needed = [*self.model.names, *self.model.kept]
        found = by_name(arrays, needed, {})
        if lacking := [name for name in needed if name not in found]:
            raise ValueError(f"the reply lacks the arrays {few(lacking)}; it has {few([*arrays])}")
        tensors = self.model.tensors()
        for name, array in found.items():
            if array.shape != tuple(tensors[name].shape):
                raise ValueError(
                    f"array {name!r} of the reply has shape {array.shape}, that of the request"
                    f" {tuple(tensors[name].shape)}"
                )
        check_unchanged(self.model.layout, by_name(arrays, [*self.model.layout.frozen], {}))
        self.model.put(found)


class AttachedEvaluation(OwnEvaluation):
    """The user's ``@app.evaluate`` of the model as it is."""

    def __init__(self, attached: Attached, config: Mapping[str, Any]) -> None:
        super().__init__(attached, config)
        self._measured = attached.measured

    def evaluate(self) -> Metrics:
        """Return the function's metrics, by their names."""
        metrics = self._measured()
        numbers = {n: v for n, v in metrics.items() if n != COUNT and not isinstance(v, list)}
        return Metrics(math.nan, math.nan, numbers)


_TRAINED: ContextVar[Attached | None] = ContextVar("trained", default=None)


def attach(model: nn.Module, names: Mapping[str, str] | None = None) -> None:
    """Let the algorithm that a request names take part in the training of ``model``.

    Call it in ``@app.train`` before the first optimizer step: the steps of the model's parameters
    then get the algorithm's terms. Wherever no algorithm trains (in ``@app.evaluate``, under
    Flower's own strategies, in a program of your own) it does nothing.

    Parameters
    ----------
    model : torch.nn.Module
        The module that is trained, or a wrapper of it: the prefixes ``module.``, ``_orig_mod.``
        and ``_module.`` do not count.
    names : dict, optional
        The request's array names by the names of the module's parameters, where they differ.

    Raises
    ------
    ValueError
        If the module lacks a parameter of the request, if it was stepped before, or if another
        module was stepped.
    """
    if (problem := _TRAINED.get()) is not None:
        problem.attach(model, names)


def by_name(own: Mapping[str, T], wanted: Sequence[str], names: Mapping[str, str]) -> dict[str, T]:
    """Return the values of ``own`` by the ``wanted`` names that they stand for."""
    stands_for = {_plain(name): name for name in wanted} | {name: name for name in wanted}
    found: dict[str, T] = {}
    for name, value in own.items():
        meant = names.get(name, name)
        if wanted_name := stands_for.get(meant) or stands_for.get(_plain(meant)):
            found.setdefault(wanted_name, value)
    return found


def _plain(name: str) -> str:
    return ".".join(part for part in name.split(".") if part not in WRAPPERS)


def _say_where_wrong(trainable: Sequence[str], found: Mapping[str, nn.Parameter]) -> None:
    """Log where PyTorch's conventions do not say what the attached module says."""
    first: dict[int, str] = {}
    tied = [name for name, p in found.items() if first.setdefault(id(p), name) != name]
    frozen = [name for name, p in found.items() if not p.requires_grad]
    others = [name for name in trainable if name not in found]
    faults = {"counts twice": tied, "is frozen and travels": frozen, "is not trained": others}
    if said := [f"{few(names)} {fault}" for fault, names in faults.items() if names]:
        log_once(f"attach: {'; '.join(said)}: ClientApp(model=...) would tell the server")


class StandIn(nn.Module):
    """Holds ``arrays``, in their order, by roles of PyTorch's conventions."""

    def __init__(self, arrays: Arrays) -> None:
        super().__init__()
        self._order, buffers = [*arrays], {*conventional_buffers(arrays)}
        for name, array in arrays.items():
            value = torch.from_numpy(np.array(array))
            if name in buffers:
                self._buffers[name] = value
            else:
                self._parameters[name] = nn.Parameter(value)

    def state_dict(self, *args: Any, **options: Any) -> Any:
        held = super().state_dict(*args, **options)
        return {name: held[name] for name in self._order}


def _not_called(*_: Any) -> Any:
    raise AssertionError("the request is answered by the app's functions")
