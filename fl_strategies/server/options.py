"""The options of every strategy, each declared once."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Literal, TypeAlias

from flwr.app import MetricRecord, RecordDict

from fl_strategies.core.hyperparameters import Declared, Scalar, choice, flag, number, option
from fl_strategies.core.ledger import LostState
from fl_strategies.server.callbacks import Callback
from fl_strategies.server.checkpoints import Checkpoints

MetricsAggregation: TypeAlias = Callable[[list[RecordDict], str], MetricRecord]
Local: TypeAlias = Mapping[str, Scalar | Mapping[int, float]]


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
    weighted_by_key: str = option(default="num-examples", type_name="str", about="As in Flower.")
    arrayrecord_key: str = option(default="arrays", type_name="str", about="As in Flower.")
    configrecord_key: str = option(default="config", type_name="str", about="As in Flower.")
    train_metrics_aggr_fn: MetricsAggregation | None = option(
        default=None,
        type_name="callable",
        about="As in Flower; by default means weighted by `weighted_by_key`. Names in what it"
        " returns, and clients' own by default, are changed where they are the server's"
        " (`fl_strategies.core.names`).",
    )
    evaluate_metrics_aggr_fn: MetricsAggregation | None = option(
        default=None,
        type_name="callable",
        about='The same for evaluation, whose names begin with "eval-".',
    )
    seed: int = number(
        default=0,
        about="Fixes client sampling and, through the requests, all randomness of our clients.",
        integer=True,
        low=0,
    )
    min_replies: int = number(
        default=1, about="Usable replies below which a training round is void.", integer=True, low=1
    )
    buffers: Iterable[str] = option(
        default=(),
        type_name="iterable of str",
        about="Names of the arrays that travel and are not trained (running statistics, counters):"
        " floats are averaged by number of samples, integers take the largest.",
    )
    ties: Iterable[Iterable[str]] = option(
        default=(),
        type_name="iterable of iterables of str",
        about="Groups of names under which one parameter travels (tied weights): it counts once"
        " in every norm and sum. `**clients.FlatModel(module).layout_options` gives"
        " `buffers`, `ties` and `frozen`.",
    )
    frozen: Mapping[str, str] = option(
        default=MappingProxyType({}),
        type_name="mapping",
        about="Digests, by name, of the arrays that nobody trains, which do not travel: a client"
        " that has others is refused.",
    )
    assume_algorithm: bool = flag(
        default=False,
        about="Whether a reply that does not say which algorithm its client ran counts as this"
        " one's: say so if your own ClientApp implements it. Our clients always say; a reply"
        " that says another is never used. FedAvg takes such replies in any case, and"
        " FedProx those of clients that heed `proximal-mu`.",
    )
    max_unusable_rounds: int = number(
        default=3,
        about="Training rounds in a row, with answers and without a usable one, that end the run"
        " with `fl_strategies.NothingUsable`; two clients at least must have answered in"
        " them, or the only one there is.",
        integer=True,
        low=1,
    )
    local: Local = option(
        default=MappingProxyType({}),
        type_name="mapping",
        about="How clients train, sent to them in every request (`clients.LocalTraining`):"
        " `solver`, `lr`, `epochs`, `batch-size` ...; a number may be a schedule {first"
        " round: number}. A client of your own is told anything else through `train_config`.",
    )
    lost_state: LostState | None = choice(
        default=None,
        choices=("reset", "refuse", "warn"),
        about="What to do with a reply of a client that no longer has the state which the server"
        " booked (restarted without its files, replaced): count it as a newcomer, leave its"
        " replies out, or count it as a newcomer with a warning. What its lost state had put"
        " into the model stays there; the server keeps no copy that it could take out. So"
        ' the default is "warn" where the server books changes (`books_changes`: FedADMM,'
        ' FedDyn, A-FedPD, SCAFFOLD, FedBCD), "reset" elsewhere. "refuse" is right where the state'
        " can be brought back, from a backup.",
    )
    callbacks: Sequence[Callback] = option(
        default=(),
        type_name="sequence of callables",
        about="Called with a `RoundInfo` at the end of each round; True ends the run, and so does"
        " what one raises, once all have seen the round and it has its checkpoint.",
    )
    acknowledge: bool = flag(
        default=True,
        about="Whether requests say which reply was used last. Off, lost replies corrupt clients'"
        " state.",
    )
    node_wait: float = number(
        default=60.0,
        about="Seconds that a query for a client's id may take, and that the first round waits"
        " for nodes that the connected ones say exist.",
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
    fold: Literal["auto", "on", "off"] = choice(
        default="auto",
        choices=("auto", "on", "off"),
        about="Whether hosts send one weighted mean in float64 in place of their clients' uploads,"
        ' where the rule needs sums alone. "auto": if those of a round would take more than'
        " `fold_memory`. Sums then depend, by rounding, on how clients are spread, and hosts are"
        " trusted to check uploads and to add them up (SECURITY.md).",
    )
    fold_memory: int = number(
        default=250,
        about='MB of uploads in a round from which on `fold="auto"` folds.',
        integer=True,
        low=0,
    )
    checkpoints: Checkpoints | None = option(
        default=None,
        type_name="Checkpoints",
        about="Where to write checkpoints, from which `start(resume=True)` goes on; none by"
        " default.",
    )
    clipping_norm: float | None = number(
        default=None,
        about="Bound on the norm of the change that one upload makes to the model, and of that of"
        " the floats among `buffers`: a larger one is scaled down to it. Where server and"
        " clients both book uploads (`books_changes`), and for what travels beside the"
        " model, the reply is left out instead: of a change scaled down, the server's sum"
        " and the clients' state would disagree for good, whereas clients undo what was left"
        " out.",
        above=0.0,
    )

    @classmethod
    def hyperparameters(cls) -> dict[str, Any]:
        """Return the algorithm's own hyperparameters, with their defaults."""
        return {n: d.default for n, d in cls.declarations.items() if n not in Options.declarations}

    @classmethod
    def unknown_names(cls, names: Iterable[str]) -> str:
        """As the base; what is the algorithm's own is named apart."""
        said, _, _ = super().unknown_names(names).partition("; ")
        return (
            f"{said}; its own are {[*cls.hyperparameters()]}, those of every strategy"
            f" {[*Options.declarations]}"
        )
