"""The laws of a Flower Strategy, each a function of what is checked that states the law.

A law compares two runs. It raises ``AssertionError``, which says the two values that differ, or
``NotApplicable``.
"""

from __future__ import annotations

import functools
import inspect
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord
from flwr.clientapp import ClientApp
from flwr.serverapp.strategy import DifferentialPrivacyServerSideFixedClipping, Strategy

from fl_strategies import Checkpoints, FederatedStrategy
from fl_strategies.core.schedules import check, require
from fl_strategies.testing.federation import (
    Federation,
    Trouble,
    an_initial_model,
    arrays_of,
    no_trouble,
    numpy_app,
    snapshot,
    torch_app,
)
from fl_strategies.testing.verdicts import (
    Arrays,
    Finding,
    NotApplicable,
    expect,
    expect_finite,
    expect_same,
    findings_of,
    seeded,
)

ULPS = 100
"""What counts as rounding, in units of the last place of the initial model's numbers."""
TROUBLED_CLIENTS, TROUBLED_PHASES = (0, 1, 3), (2, 3)


class Stopped(Exception):
    """Ends a run as a crash would."""


class Run(NamedTuple):
    """The models, by name of array, before the first round and after each; and who ran."""

    models: list[Arrays]
    federation: Federation


@dataclass(frozen=True)
class Subject:
    """What a law is stated on: a strategy's maker, and the federation on which it runs."""

    make: Callable[..., Strategy]
    app: ClientApp
    initial: ArrayRecord
    clients: int
    rounds: int

    def federation(self, trouble: Trouble = no_trouble, *, backwards: bool = False) -> Federation:
        """Return new clients."""
        return Federation(self.app, self.clients, trouble, backwards=backwards)

    @functools.cached_property
    def plain(self) -> Run:
        """A run without any trouble."""
        return self.run()

    @functools.cached_property
    def backwards(self) -> Run:
        """A run whose replies arrive in reverse."""
        return self.run(self.federation(backwards=True))

    @functools.cached_property
    def unreached(self) -> Run:
        """A run in which some clients do not get some requests."""
        return self.run(self.federation(meets("unreached")))

    @property
    def rounding(self) -> float:
        """What counts as rounding, relative to an array's largest number."""
        types = [array.dtype for array in arrays_of(self.initial).values()]
        eps = [float(np.finfo(one).eps) for one in types if one.kind == "f"]
        return ULPS * max(eps, default=0.0)

    def model(self) -> ArrayRecord:
        """Return the initial model: records of its own, in case that somebody writes into them."""
        return ArrayRecord(dict(self.initial))

    def run(
        self,
        on: Federation | None = None,
        *,
        rounds: int = 0,
        seed: int = 0,
        wrap: Callable[[Strategy], Strategy] = lambda strategy: strategy,
        stop: int = 0,
        options: dict[str, Any] | None = None,
        **start: Any,
    ) -> Run:
        """Run a new strategy; raise ``AssertionError`` if an exception ends it.

        ``seed`` is the state of the process's generators. The run crashes in round ``stop``.
        """
        federation, models = on or self.federation(), list[Arrays]()

        def see(number: int, arrays: ArrayRecord) -> None:
            models.append({name: array.copy() for name, array in arrays_of(arrays).items()})
            if stop and number == stop:
                raise Stopped

        with seeded(seed):
            strategy = wrap(self.make(**(options or {})))
            initial, length = self.model(), rounds or self.rounds
            try:
                strategy.start(
                    federation,
                    **{"initial_arrays": initial} | start,
                    num_rounds=length,
                    evaluate_fn=see,
                )
            except Stopped:
                pass
            except Exception as error:
                ended = f"the run ended in round {len(models)} with {type(error).__name__}: {error}"
                raise AssertionError(ended) from error
        return Run(models, federation)

    def takes(self, option: str) -> bool:
        """Whether the maker takes this keyword argument."""
        parameters = inspect.signature(self.make).parameters
        if option in parameters:
            return True
        if all(each.kind is not each.VAR_KEYWORD for each in parameters.values()):
            return False
        try:
            self.make(**{option: None})
        except TypeError:
            return False
        return True


def meets(what: str) -> Trouble:
    """Return the trouble that some clients have in some phases of training."""

    def trouble(kind: str, phase: int, client: int) -> str:
        here = phase in TROUBLED_PHASES and client in TROUBLED_CLIENTS
        return what if kind == "train" and here else ""

    return trouble


def expect_no_difference(subject: Subject, what: str) -> None:
    """Raise ``AssertionError`` unless clients in this trouble count as clients never reached."""
    found, expected = subject.run(subject.federation(meets(what))), subject.unreached
    if not any(
        {*asked} & {*TROUBLED_CLIENTS}
        for phase, asked in enumerate(found.federation.asked, start=1)
        if phase in TROUBLED_PHASES
    ):
        raise NotApplicable("none of the clients in trouble was asked")
    expect_finite(found.models[-1], f"after {what} replies")
    for a, b in zip(found.models, expected.models, strict=True):
        expect_same(a, b, f"if replies are {what}", "if these clients are never reached")


def trains(subject: Subject) -> None:
    """A run whose clients all answer moves the model."""
    models, federation = subject.plain
    federation.done("train")
    same = all((models[-1][name] == array).all() for name, array in models[0].items())
    expect(not same, f"the model after {subject.rounds} rounds is the initial model")


def finite(subject: Subject) -> None:
    """The model is finite after every round."""
    for number, arrays in enumerate(subject.plain.models):
        expect_finite(arrays, f"after round {number}")


def form(subject: Subject) -> None:
    """Each round's model has the names, shapes and types of the initial arrays, in their order."""
    first, *others = subject.plain.models
    for number, arrays in enumerate(others, start=1):
        expect_same(
            {name: np.zeros_like(array) for name, array in arrays.items()},
            {name: np.zeros_like(array) for name, array in first.items()},
            f"after round {number}",
            "at first",
        )


def order_of_replies(subject: Subject) -> None:
    """The order in which replies arrive does not matter, but for rounding."""
    expect_order(subject, subject.rounding)


def order_to_the_bit(subject: Subject) -> None:
    """The order in which replies arrive does not matter, to the last bit."""
    expect_order(subject, 0.0)


def expect_order(subject: Subject, rounding: float) -> None:
    """Raise ``AssertionError`` if the order of replies changes more than ``rounding``."""
    found, expected = subject.backwards.models[-1], subject.plain.models[-1]
    expect_same(found, expected, "if replies arrive in reverse", "if they do not", rounding)


def lost_replies(subject: Subject) -> None:
    """A lost reply does not end the run, and counts for nothing.

    The model is that of a run in which the client never got the request, to the bit.
    """
    expect_no_difference(subject, "lost")


def failed_replies(subject: Subject) -> None:
    """An error in place of a reply does not end the run, and counts for nothing.

    The model is that of a run in which the client never got the request, to the bit.
    """
    expect_no_difference(subject, "failed")


def late_replies(subject: Subject) -> None:
    """A client that works on after the server stopped waiting counts for nothing.

    The model is that of a run in which the client never got the request, to the bit.
    """
    expect_no_difference(subject, "late")


def diverged_replies(subject: Subject) -> None:
    """A client whose numbers are NaN does not end the run, and the model stays finite."""
    diverged: list[int] = []

    def trouble(kind: str, phase: int, client: int) -> str:
        if kind == "train" and phase == 2 and not diverged:
            diverged.append(client)
        return "diverged" if kind == "train" and phase == 2 and client in diverged else ""

    for number, arrays in enumerate(subject.run(subject.federation(trouble)).models):
        expect_finite(arrays, f"after round {number}, where one reply to round 2 is NaN")


def rounds_without_replies(subject: Subject) -> None:
    """Rounds without any reply do not end the run, and leave the model as it was.

    If the next round gets the replies that it gets without these rounds, it gives the same model,
    but for rounding.
    """
    last, skipped = 2, (3, 4)
    found = subject.run(
        subject.federation(lambda kind, phase, client: "lost" if phase in skipped else "")
    )
    if len(found.federation.asked) != subject.rounds:
        raise NotApplicable("the clients are not asked once in each round")
    for number in skipped:
        when = f"after round {number}, without replies"
        expect_same(found.models[number], found.models[last], when, f"after round {last}")
    next_round, same_round = skipped[-1] + 1, last + 1
    uploads, others = (
        found.federation.uploads(next_round),
        subject.plain.federation.uploads(same_round),
    )
    if uploads.keys() == others.keys() and all(
        np.array_equal(array, others[client][name])
        for client, arrays in uploads.items()
        for name, array in arrays.items()
    ):
        what = f"after round {next_round}, two of them without replies"
        ends = found.models[next_round], subject.plain.models[same_round]
        expect_same(*ends, what, f"after the same {same_round} rounds", subject.rounding)


def evaluation(subject: Subject) -> None:
    """Evaluation that fails at all clients does not end the run, and does not change the model."""
    plain = subject.plain
    if not plain.federation.phases["evaluate"]:
        raise NotApplicable("the strategy has no client evaluate")
    failing = subject.federation(lambda kind, *_: "failed" if kind == "evaluate" else "")
    found = subject.run(failing)
    expect_same(found.models[-1], plain.models[-1], "if all evaluation fails", "if none does")


def arguments(subject: Subject) -> None:
    """The initial arrays and the configs that are passed in are not written to."""
    initial = subject.model()
    names = ("train_config", "evaluate_config")
    configs: dict[str, Any] = {name: ConfigRecord({"note": "mine"}) for name in names}
    before = arrays_of(subject.model())
    subject.run(rounds=2, initial_arrays=initial, **configs)
    expect_same(arrays_of(initial), before, "in the initial arrays after the run", "before it")
    for name, config in configs.items():
        now = dict(config)
        expect(now == {"note": "mine"}, f"{name} is {now} after the run, {{'note': 'mine'}} before")


def replies(subject: Subject) -> None:
    """The replies are not written to: who reads them next finds them as they arrived."""
    for one in subject.plain.federation.done("train"):
        now = snapshot(one.reply.content)
        expect_same(now.arrays, one.held.arrays, "in a reply after the round", "before")
        expect(
            now.others == one.held.others,
            f"a reply holds {now.others} after the round, {one.held.others} before",
        )


def seed(subject: Subject) -> None:
    """Two strategies that are made alike give the same model, to the bit.

    Python's and NumPy's global generators begin both runs in the same state.
    """
    first, second = subject.plain, subject.run()
    expect_same(second.models[-1], first.models[-1], "in the second run", "in the first")


def global_generators(subject: Subject) -> None:
    """The model does not depend on Python's and NumPy's global generators, but for rounding."""
    first, second = subject.plain, subject.run(seed=1)
    what = "if the global generators begin with seed 1"
    expect_same(second.models[-1], first.models[-1], what, "with seed 0", subject.rounding)


def resume(subject: Subject) -> None:
    """A run that crashes and resumes from its checkpoint ends as the uninterrupted run."""
    if not subject.takes("checkpoints"):
        raise NotApplicable("make takes no `checkpoints`")
    with tempfile.TemporaryDirectory() as folder:

        def checkpoints(name: str) -> dict[str, Any]:
            return {"checkpoints": Checkpoints(f"{folder}/{name}", every=2)}

        whole = subject.run(options=checkpoints("whole"))
        made = len(whole.models) - 1  # fewer than asked for where some are skipped
        if not made:
            raise NotApplicable("the run has no round in which clients are asked")
        same = subject.federation()
        subject.run(same, options=checkpoints("crashed"), stop=max(1, made - 2))
        again = subject.run(same, options=checkpoints("crashed"), resume=True)
    expect_same(again.models[-1], whole.models[-1], "after a crash", "without it")


def wrapper(subject: Subject) -> None:
    """Inside Flower's privacy wrapper, if that neither clips nor adds noise, the model is the same.

    It may differ by rounding. A strategy that refuses the wrapper does so before it asks a client.
    """
    plain, wrapped = subject.plain, subject.federation()
    if type(subject.make()).__name__.startswith("DifferentialPrivacy"):
        raise NotApplicable("it is a wrapper itself")

    def wrap(strategy: Strategy) -> Strategy:
        return DifferentialPrivacyServerSideFixedClipping(strategy, 0.0, 1e6, subject.clients)

    try:
        found = subject.run(wrapped, wrap=wrap)
    except AssertionError as error:
        if isinstance(error.__cause__, ValueError) and not wrapped.asked:
            raise NotApplicable(f"refused: {error.__cause__}") from error
        raise
    expect_same(
        found.models[-1], plain.models[-1], "inside the wrapper", "without it", subject.rounding
    )


STRATEGY_LAWS: tuple[Callable[[Subject], None], ...] = (
    trains,
    finite,
    form,
    order_of_replies,
    order_to_the_bit,
    lost_replies,
    failed_replies,
    late_replies,
    diverged_replies,
    rounds_without_replies,
    evaluation,
    arguments,
    replies,
    seed,
    global_generators,
    resume,
    wrapper,
)
"""The laws of a strategy, for ``check_strategy(..., laws=[...])`` and for pytest's parameters."""


def check_strategy(
    make: Callable[..., Strategy],
    *,
    app: ClientApp | None = None,
    initial: ArrayRecord | None = None,
    clients: int = 5,
    rounds: int = 6,
    laws: Sequence[Callable[[Subject], None]] | None = None,
    on_fail: str = "raise",
) -> list[Finding]:
    """Check the laws that every Flower ``Strategy`` of the Message API owes its users.

    Each law makes new strategies and runs them on small federations in this process.

    Parameters
    ----------
    make : callable
        ``make()`` returns a new strategy. If it takes ``checkpoints``, as
        ``lambda **options: FedADMM(rho=0.5, **options)``, it is also checked whether runs resume.
    app : ClientApp, optional
        The clients. By default those of :func:`numpy_app`; for strategies of this package its own
        clients, in PyTorch.
    initial : ArrayRecord, optional
        The initial model; by default ``weight`` [2, 3] and ``bias`` [2] in float32.
    clients : int >= 1 (default 5)
        How many there are; a strategy must be content with them.
    rounds : int >= 6 (default 6)
    laws : sequence of functions, optional
        Those to check; by default ``STRATEGY_LAWS``.
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
        For an argument outside its range.

    Examples
    --------
    >>> from flwr.serverapp.strategy import FedAvg
    >>> check_strategy(FedAvg, laws=[trains, lost_replies])[1]
    Finding(law='lost_replies', outcome='passed', reason='')
    """
    check("clients", clients, low=1, integer=True)
    check("rounds", rounds, low=6, integer=True)
    require(callable(make), "make", "a function that returns a strategy", make)
    strategy = make()
    require(isinstance(strategy, Strategy), "make()", "a Strategy of flwr.serverapp", strategy)
    initial = an_initial_model() if initial is None else initial
    subject = Subject(make, app or _clients_of(strategy), initial, clients, rounds)
    return findings_of(STRATEGY_LAWS if laws is None else laws, subject, on_fail)


def _clients_of(strategy: Strategy) -> ClientApp:
    """Return clients that the strategy, or the one that it wraps, can work with."""
    while isinstance(getattr(strategy, "strategy", None), Strategy):
        strategy = strategy.strategy  # type: ignore[attr-defined]
    if not isinstance(strategy, FederatedStrategy):
        return numpy_app()
    return torch_app()
