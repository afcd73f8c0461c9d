"""The options of every strategy, each declared once."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Literal, TypeAlias

from flwr.app import MetricRecord, RecordDict

from fl_strategies.core.hyperparameters import Declared, Scalar, choice, flag, number, option
from fl_strategies.core.ledger import LostState
from fl_strategies.core.records import Round
from fl_strategies.core.spelling import listed, unknown
from fl_strategies.messages.wire import MAX_SAMPLES
from fl_strategies.parts import STAGES
from fl_strategies.parts.availability import Availability
from fl_strategies.parts.combine import Combine
from fl_strategies.parts.compression import BFloat16, Compression
from fl_strategies.parts.pace import Pace
from fl_strategies.parts.part import Part
from fl_strategies.parts.privacy import Gaussian
from fl_strategies.parts.regularizer import Regularizer
from fl_strategies.parts.selection import Selection
from fl_strategies.parts.server_step import ServerStep
from fl_strategies.parts.virtual_clock import VirtualClock
from fl_strategies.server.callbacks import Callback
from fl_strategies.server.checkpoints import Checkpoints
from fl_strategies.solvers.local import default_training

MetricsAggregation: TypeAlias = Callable[[list[RecordDict], str], MetricRecord]
Local: TypeAlias = Mapping[str, Scalar | Mapping[int, float]]


def is_text(value: object) -> bool:
    """Whether ``value`` is a text."""
    return isinstance(value, str)


def all_in(values: object, accepted: Callable[[Any], bool]) -> bool:
    """Whether ``values`` can be iterated, is no text, and holds only what is ``accepted``.

    What is iterated only once is not looked into.
    """
    if not isinstance(values, Iterable) or isinstance(values, str):
        return False
    return isinstance(values, Iterator) or all(map(accepted, values))


def are_names(values: object) -> bool:
    """Whether ``values`` is an iterable of texts, and not one text."""
    return all_in(values, is_text)


def part(kind: type[Part], called: str, about: str) -> Any:
    """Declare the option that takes a part of this kind; by default there is none."""
    return option(
        default=None,
        type_name=f"{called} of `fl_strategies.parts`",
        accepts=lambda value: isinstance(value, kind),
        about=about,
    )


class Options(Declared):
    """What every strategy takes."""

    fraction_train: float = number(
        default=1.0,
        about="Share of the connected clients that train in a round.",
        above=0.0,
        high=1.0,
    )
    fraction_evaluate: float = number(
        default=1.0,
        about="Share of the connected clients that evaluate after a round.",
        low=0.0,
        high=1.0,
    )
    min_train_nodes: int = number(
        default=1, about="Fewest clients asked to train.", integer=True, low=1
    )
    min_evaluate_nodes: int = number(
        default=1, about="Fewest clients asked to evaluate.", integer=True, low=1
    )
    min_available_nodes: int = number(
        default=1, about="Fewest clients connected before a round starts.", integer=True, low=1
    )
    weighted_by_key: str = option(
        default="num-examples",
        type_name="str",
        about="As in Flower, from 1 to 10^9.",
        accepts=is_text,
    )
    arrayrecord_key: str = option(
        default="arrays", type_name="str", about="As in Flower.", accepts=is_text
    )
    configrecord_key: str = option(
        default="config", type_name="str", about="As in Flower.", accepts=is_text
    )
    train_metrics_aggr_fn: MetricsAggregation | None = option(
        default=None,
        type_name="callable",
        accepts=callable,
        about="As in Flower; by default means weighted by `weighted_by_key`. Metrics whose names"
        " belong to the server are renamed (`fl_strategies.core.metric_names`).",
    )
    evaluate_metrics_aggr_fn: MetricsAggregation | None = option(
        default=None,
        type_name="callable",
        accepts=callable,
        about='The same for evaluation, whose names begin with "eval-".',
    )
    seed: int = number(
        default=0,
        about="Fixes client sampling, our clients' mini-batches, and what torch draws there.",
        integer=True,
        low=0,
        high=2**63 - 1,  # more does not fit into a message
    )
    min_replies: int = number(
        default=1, about="A round with fewer usable replies is skipped.", integer=True, low=1
    )
    buffers: Iterable[str] | None = option(
        default=None,
        type_name="iterable of str",
        accepts=are_names,
        about="Names of the arrays that travel and are not trained (running statistics, counters):"
        " floats are averaged, weighted by samples; of integers the largest is taken. You need not"
        " give them: without a value, clients describe their models, and if none does,"
        " PyTorch's conventions hold: buffers are integers, and names that end in `running_mean`,"
        " `running_var` or `num_batches_tracked`. Names that are given, also none, are all.",
    )
    ties: Iterable[Iterable[str]] | None = option(
        default=None,
        type_name="iterable of iterables of str",
        accepts=lambda groups: all_in(groups, are_names),
        about="Groups of names under which one parameter travels (tied weights): it counts once"
        " in every norm and sum. You need not give them: clients describe their models.",
    )
    frozen: Mapping[str, str] | None = option(
        default=None,
        type_name="mapping",
        accepts=lambda digests: isinstance(digests, Mapping),
        about="Digests, by name, of the frozen arrays, which nobody trains and which do not"
        " travel: a client with other arrays is refused. You need not give them: clients describe"
        " their models. If `buffers`, `ties` and `frozen` are all given"
        " (`**clients.Border(module).layout_options`), no client is asked.",
    )
    assume_algorithm: bool = flag(
        default=False,
        about="Whether a reply that names no algorithm counts as a reply of this one: set it if"
        " your own ClientApp implements the algorithm. Our clients always name their algorithm;"
        " a reply that names another is never used. FedAvg always uses replies without a name,"
        " and FedProx those of clients that use `proximal-mu`.",
    )
    max_unusable_rounds: int = number(
        default=3,
        about="The run ends with `fl_strategies.NothingUsable` after so many training rounds in a"
        " row that were skipped and had unusable replies; at least two clients must have answered"
        " in them, or the only one that exists.",
        integer=True,
        low=1,
    )
    local: Local = option(
        default=MappingProxyType({}),
        type_name="mapping",
        accepts=lambda local: isinstance(local, Mapping),
        about="How clients train, sent in every request (`clients.LocalTraining`):"
        " `solver`, `lr`, `epochs`, `batch-size` ...; a number may be a schedule {1: 0.1, 51:"
        " 0.01}, by the rounds that the log prints. Use `train_config` to tell your own client"
        " anything else.",
    )
    lost_state: LostState | None = choice(
        default=None,
        choices=("reset", "refuse", "warn"),
        about="What to do with a reply of a client that lost its acknowledged state (restarted"
        " without its files, or replaced): treat the client as new (reset),"
        " leave its replies out (refuse), or treat it as new with a warning (warn). What"
        " the lost state added to the global model remains there: the server keeps no copy of it."
        ' So the default is "warn" if the server adds up changes (`accumulates_changes`: FedADMM,'
        ' FedDyn, A-FedPD, SCAFFOLD, ProxSkip, FedBCD ...), else "reset". Use "refuse" if you can'
        " restore the state from a backup.",
    )
    callbacks: Sequence[Callback] = option(
        default=(),
        type_name="sequence of callables",
        accepts=lambda called: all_in(called, callable),
        about="Called with a `RoundInfo` at the end of each round. If one returns True, the run"
        " ends. If one raises, the run ends after all have seen the round and its checkpoint is"
        " written.",
    )
    quiet: bool = flag(
        default=False,
        about="Whether `start` logs no rounds: only warnings and errors remain. The numbers are in"
        " the result and in callbacks. (The level of the logger `fl_strategies` does this for all"
        " strategies.)",
    )
    acknowledge: bool = flag(
        default=True,
        about="Whether requests say which reply was used last. Without this, lost replies corrupt"
        " clients' states.",
    )
    node_wait: float = number(
        default=60.0,
        about="Seconds without another answer after which clients are no longer asked for their"
        " ids, or for a description of their model; and without another client, after which the"
        " first round no longer waits for nodes which, as the connected nodes say, exist.",
        above=0.0,
    )
    shared_population: int = number(
        default=0,
        about="Number of clients 0, 1, ... that any host may run (`clients.client_app(...,"
        " hosts=...)`), as in a simulation: all hosts can reach their data and states. 0: a client"
        " belongs to the node that introduced it first.",
        integer=True,
        low=0,
    )
    clients_per_message: int = number(
        default=1000,
        about="The largest number of clients in one message to a host; 268 MB of uploads bound it"
        " too. A host answers when the last client of the message is done: with a `timeout`, a"
        " slow client costs the round all clients of its message, which take back their work."
        " With 1, it costs the round that client alone, and the model travels once per client.",
        integer=True,
        low=1,
    )
    fold: Literal["auto", "on", "off"] = choice(
        default="auto",
        choices=("auto", "on", "off"),
        about="Whether hosts send one weighted mean in float64 instead of their clients' uploads,"
        ' if the rule needs only sums. "auto": if the uploads of a round would take more than'
        " `fold_memory`. By rounding, sums then depend on how clients are spread over hosts, and"
        " hosts are trusted to check and to add uploads (SECURITY.md).",
    )
    fold_memory: int = number(
        default=250,
        about='`fold="auto"` sends means if the uploads of a round take more MB than this.',
        integer=True,
        low=0,
    )
    checkpoints: Checkpoints | None = option(
        default=None,
        type_name="Checkpoints",
        accepts=lambda checkpoints: isinstance(checkpoints, Checkpoints),
        about="Where to write checkpoints, from which `start(resume=True)` continues; none by"
        " default.",
    )
    max_samples: int | None = number(
        default=None,
        about="The most samples of one client, if you know a bound: a reply that reports more is"
        " left out. Without it a client that claims 1,000,000,000 outweighs all others wherever"
        " weights are numbers of samples.",
        integer=True,
        low=1,
        high=MAX_SAMPLES,
    )
    clipping_norm: float | None = number(
        default=None,
        about="Bound on the norm of the change that one upload makes to the model, and to the"
        " floats among `buffers`: a larger change is scaled down to it. If server and clients"
        " both add uploads to their states (`accumulates_changes`), and for extra vectors, the"
        " reply is left out instead: after a scaled change, the server's sum and the clients'"
        " states would disagree forever, while clients undo a reply that was left out.",
        above=0.0,
    )

    selection: Selection | Callable[[Round], Iterable[int]] | None = option(
        default=None,
        type_name="selecting part of `fl_strategies.parts`, or a function",
        accepts=lambda part: (
            isinstance(part, Selection) or (callable(part) and not isinstance(part, type))
        ),
        about="Which clients are asked in a round: `selection=BySize()`, or a function that"
        " returns clients of `round.connected`.",
    )
    download: BFloat16 | None = part(
        BFloat16,
        "number format",
        about="How the model travels to clients: `download=BFloat16()` sends two bytes a number,"
        " and the server keeps the exact model.",
    )
    compression: Compression | None = part(
        Compression,
        "codec",
        about="How clients compress what they upload: `compression=TopK(share=0.01)`. Clients keep"
        " what is left out, and need a store for it, but for `QSGD`.",
    )
    privacy: Gaussian | None = part(
        Gaussian,
        "privacy part",
        about="Differential privacy of clients: `privacy=Gaussian(clip=1.0, noise=1.0)`, with"
        " `epsilon` in each round's metrics. It needs dp-accounting.",
    )
    combine: Combine | None = part(
        Combine,
        "combining part",
        about="What takes the place of the weighted mean of the uploads: `combine=Median()`.",
    )
    regularizer: Regularizer | None = part(
        Regularizer,
        "penalty",
        about="A penalty on the global model, by a proximal step: `regularizer=L1(weight=0.01)`.",
    )
    server_step: ServerStep | None = part(
        ServerStep,
        "server step",
        about="How far the global model moves towards what the rule aggregated:"
        " `server_step=Adam(lr=0.1)`; by default all the way.",
    )
    clock: VirtualClock | None = part(
        VirtualClock,
        "clock",
        about="How fast devices and links are: `clock=Clock(step=0.01, spread=0.5)`, with"
        " `virtual-seconds` in each round's metrics.",
    )
    availability: Availability | None = part(
        Availability,
        "availability",
        about="Which of the connected clients are there: `availability=Markov(on=8, off=4)`;"
        " selection chooses among them.",
    )
    pace: Pace | None = part(
        Pace,
        "pace",
        about="What is waited for: `pace=Deadline(seconds=30, over_select=1.3)`, or"
        " `pace=Buffered(size=10, concurrency=50)` for asynchronous training; by the clock, or with"
        ' `order="arrival"` in real time.',
    )

    @property
    def around(self) -> dict[str, Part]:
        """The parts around the algorithm by stage, in the order of a round."""
        given = {stage: getattr(self, stage) for stage in STAGES}
        return {stage: part for stage, part in given.items() if isinstance(part, Part)}

    @property
    def described(self) -> str:
        """The class with its parts, for messages."""
        parts = ", ".join(f"{stage}={part!r}" for stage, part in self.around.items())
        return f"{type(self).__name__} with {parts}" if parts else type(self).__name__

    @classmethod
    def hyperparameters(cls) -> dict[str, Any]:
        """Return the algorithm's own hyperparameters, with their defaults."""
        return {n: d.default for n, d in cls.declarations.items() if n not in cls.common}

    @classmethod
    def unknown_names(cls, arguments: Mapping[str, Any]) -> str:
        """As the base; settings of clients are told apart, and only its own are listed."""
        text = f"{cls.__name__} has no argument {unknown(arguments, cls.declarations)}"
        settings = default_training().settings if getattr(cls, "uses_local", True) else {}
        if of_clients := [name for name in arguments if name.replace("_", "-") in settings]:
            text += f"; local={{...}} takes {listed(of_clients)}"
        return f"{text}; its own are {listed(cls.hyperparameters())}"


Options.common = Options.declarations
