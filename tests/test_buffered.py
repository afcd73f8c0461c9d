"""Laws of asynchronous training: who is asked, what counts and how much, what open work leaves."""

from __future__ import annotations

import copy
import heapq
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from arrivals import Slow
from federations import drop
from flwr.app import Error, Message
from flwr.serverapp.strategy import DifferentialPrivacyServerSideFixedClipping
from hosted import SHAPES, federation, shared
from laws import RATE, REVIEWED, START, TABLE, Row, Shuffled, local, quiet, rounds_of, train
from limits import STEPS
from problems import (
    CLIENT_OF,
    NODES,
    grid,
    make_client_app,
    optimum,
    quadratics,
    to_record,
    to_vector,
    used_states,
)

from clients import Hosted
from clients.node.in_process import InProcessGrid
from fl_strategies import (
    Checkpoints,
    FedADMM,
    FedAvg,
    FederatedStrategy,
    RoundInfo,
    as_legacy,
)
from fl_strategies.core.randomness import stream
from fl_strategies.parts import (
    Buffered,
    Clock,
    Deadline,
    Krum,
    Markov,
    Momentum,
    Probabilities,
)

KNOBS: dict[str, dict[str, Any]] = {"fedadmm": {"eta": "fraction"}}
CLOCK = Clock(step=1.0, spread=1.0, jitter=0.5)
CLIENTS = 6


def options(row: Row) -> dict[str, Any]:
    return {"local": local(), **KNOBS.get(row.name, {})}


TAKEN = [row for row in TABLE if not Buffered.refusal(row.strategy(**options(row)), row.name)]
some_taken = pytest.mark.parametrize(
    "row", [row for row in TAKEN if row.name in ("fedavg", "fedadmm", "moon")], ids=str
)
ADMM: dict[str, Any] = {"eta": "fraction", "rho": 0.5, "clock": CLOCK}


def asynchronous(row: Row, size: int = 2, concurrency: int = 4, **others: Any) -> FederatedStrategy:
    pace = Buffered(size=size, concurrency=concurrency)
    return row.strategy(**options(row), clock=CLOCK, pace=pace, **others)


def test_it_goes_around_what_averages_models_and_around_fedadmm_with_a_fraction() -> None:
    assert REVIEWED & {row.name for row in TAKEN} == {
        "fedsgd", "fedavg", "fedprox", "fedadmm", "ditto", "fedrep", "fedbabu", "apfl", "moon",
        "per-fedavg", "pfedme",
    }  # fmt: skip


# ---- its limits ---------------------------------------------------------------------------------


@cache
def synchronous(name: str) -> tuple[bytes, list[float]]:
    """Return the model and the virtual seconds of four rounds."""
    (row,) = (row for row in TAKEN if row.name == name)
    plain = row.strategy(**options(row), clock=CLOCK)
    found = train(plain, grid(quadratics(CLIENTS)), 4).tobytes()
    return found, rounds_of(plain, "virtual-seconds")


@some_taken
def test_all_at_work_and_all_waited_for_is_the_synchronous_run_to_the_bit(row: Row) -> None:
    alike = asynchronous(row, CLIENTS, CLIENTS)
    found = train(alike, grid(quadratics(CLIENTS)), 4).tobytes()
    assert (found, rounds_of(alike, "virtual-seconds")) == synchronous(row.name)
    assert rounds_of(alike, "oldest-reply") == [0.0] * 4


@pytest.mark.slow
def test_asynchronous_fedadmm_reaches_the_optimum_of_the_mean_loss() -> None:
    given = ADMM | {"rho": 1.0}
    strategy = quiet(FedADMM, **given, pace=Buffered(size=1, concurrency=4))
    found = train(strategy, grid(quadratics(5)), 500)
    assert max(rounds_of(strategy, "oldest-reply")) > 10
    np.testing.assert_allclose(found, optimum(quadratics(5)), atol=1e-6)


# ---- what counts, and how much ------------------------------------------------------------------


class Trained(NamedTuple):
    """What a client comes to: its model w and, in FedADMM, its dual variable y."""

    w: np.ndarray
    y: np.ndarray


class Work(NamedTuple):
    """A client at work, in the order of an event queue."""

    end: float
    client: int
    begun: int
    since: float
    received: np.ndarray
    trained: Trained
    lost: bool


class Seen(NamedTuple):
    """What there is to see after a server step: the clients are those used, and those at work."""

    theta: np.ndarray
    seconds: float
    ages: dict[int, int]
    at_work: dict[int, tuple[int, float]]


def drawn(idle: Iterable[int], many: int, seed: int, *round: int) -> list[int]:
    """Return whom a round asks of the idle clients, in the order in which they get a place."""
    known = sorted(idle)
    sample = stream(seed, "sample", *round).choice(len(known), min(many, len(known)), replace=False)
    asked = sorted(known[place] for place in sample)
    return [asked[place] for place in stream(seed, "places", *round).permutation(len(asked))]


def played_out(
    rounds: int,
    clients: int,
    clock: Clock,
    *,
    seed: int,
    size: int,
    concurrency: int,
    rho: float,
    step: Callable[[np.ndarray, list[tuple[int, Work]]], np.ndarray],
) -> Iterator[Seen]:
    """Play a run out event by event: a client that ends is replaced at once, until K have replied.

    With rho = 0 a client trains as in FedAvg, else as in FedADMM. ``step`` takes the model and the
    ages and works of the buffer.
    """
    problems, theta, now = quadratics(clients), START, 0.0
    kept = dict.fromkeys(range(clients), Trained(START, 0.0 * START))
    newcomers = {*range(clients)}
    queue: list[Work] = []

    def train(client: int) -> Trained:
        w, y = kept[client] if rho and client not in newcomers else (theta, 0.0 * theta)
        for _ in range(STEPS):
            w = w - RATE * (problems[client].gradient(w) + y + rho * (w - theta))
        return Trained(w, y + rho * (w - theta))

    def begin(client: int, t: int) -> None:
        took, share = clock.seconds(seed, t, client, STEPS), clock.drops_out(seed, t, client)
        end = now + took * (1.0 if share is None else share)
        work = Work(end, client, t, now, theta, train(client), share is not None)
        heapq.heappush(queue, work)

    for t in range(1, rounds + 1):
        again, over, buffer, line = list[int](), set[int](), list[Work](), list[int]()
        while True:
            idle = {*range(clients)} - over - {work.client for work in queue} - {*line}
            free = concurrency - len(queue)
            if idle and len(line) < free:
                line += drawn(idle, free + size - len(buffer) - 1, seed, t, *again)
                again = [sum(again) + 1]
            while line and len(queue) < concurrency:
                begin(line.pop(0), t)
            if len(queue) < concurrency:
                assert {work.client for work in queue} | over == {*range(clients)}
            if not queue:
                break
            work = heapq.heappop(queue)
            now, over = max(now, work.end), over | {work.client}
            buffer += [] if work.lost else [work]
            if len(buffer) == size:
                break
        assert not line
        theta = step(theta, [(t - work.begun, work) for work in buffer])
        kept |= {work.client: work.trained for work in buffer}
        newcomers -= {work.client for work in buffer}
        ages = {work.client: t - work.begun for work in buffer}
        yield Seen(theta, now, ages, {work.client: (work.begun, work.since) for work in queue})


def averaged(
    s: Callable[[int], float], *, lr: float = 1.0, mixing: float = 0.0
) -> Callable[[np.ndarray, list[tuple[int, Work]]], np.ndarray]:
    """Return (6) for the weights ``s``, or the mean of (7) over the buffer."""

    def step(theta: np.ndarray, buffer: list[tuple[int, Work]]) -> np.ndarray:
        moves = [
            mixing * s(age) * (work.trained.w - theta)
            if mixing
            else s(age) * (work.trained.w - work.received)
            for age, work in buffer
        ]
        return theta + lr * np.mean(moves, axis=0) if moves else theta

    return step


def summed(clients: int, rho: float) -> Callable[[np.ndarray, Any], np.ndarray]:
    """Return the mean of all clients' last u = w + y/rho, by which asynchronous FedADMM steps."""
    last = dict.fromkeys(range(clients), START)

    def step(theta: np.ndarray, buffer: list[tuple[int, Work]]) -> np.ndarray:
        last.update({work.client: work.trained.w + work.trained.y / rho for _, work in buffer})
        return np.mean([*last.values()], axis=0)

    return step


def s(age: int) -> float:
    return float((1 + age) ** -0.5)


STALENESS: dict[str, tuple[dict[str, Any], Callable[[int], float]]] = {
    "constant": ({}, lambda a: 1.0),
    "polynomial": ({"power": 0.7}, lambda a: (a + 1) ** -0.7),
    "hinge": ({"power": 2.0, "grace": 1}, lambda a: 1.0 if a <= 1 else 1 / (2.0 * (a - 1) + 1)),
}
BUFF: dict[str, Any] = {"make": FedAvg, "weights": "uniform"}
PLAYED: dict[str, tuple[dict[str, Any], dict[str, Any], Callable[[], Any]]] = {
    "fedbuff": (BUFF, {"size": 3}, lambda: averaged(s)),
    "fedbuff with a server rate": (
        BUFF | {"server_step": Momentum(lr=0.7, beta=0.0)}, {"size": 2}, lambda: averaged(s, lr=0.7)
    ),
    **{
        f"{name}, {kind}": (
            BUFF,
            {"size": size, "staleness": kind, **given, **({"mixing": 0.6} if mixing else {})},
            partial(averaged, weight, mixing=mixing),
        )
        for name, size, mixing, kinds in (
            ("fedasync", 1, 0.6, ["hinge"]),
            ("mixed", 3, 0.6, ["polynomial"]),
            ("moved", 3, 0.0, [*STALENESS]),
        )
        for kind in kinds
        for given, weight in [STALENESS[kind]]
    },
    "fedadmm": (
        {"make": FedADMM, "eta": "fraction", "rho": 0.5}, {"size": 3}, lambda: summed(9, 0.5)
    ),
}  # fmt: skip


@pytest.mark.parametrize(
    ("played", "dropout", "concurrency"),
    [
        *((played, 0.3, 5) for played in PLAYED),
        *((played, *rest) for played in ("fedbuff", "fedadmm") for rest in ((0.0, 5), (0.6, 8))),
    ],
)
def test_a_run_is_that_of_the_papers_played_out_event_by_event(
    played: str, dropout: float, concurrency: int
) -> None:
    """Model, seconds, ages, and who is at work with which model since when, after each step."""
    options, values, step = PLAYED[played]
    seen: list[Seen] = []

    def note(info: RoundInfo) -> None:
        works = {i: (p.asked.round.number, p.since) for i, p in strategy.phases.open.items()}
        acked = strategy.ledger.acked
        ages = {client: info.server_round - acked[client] for client in info.clients}
        theta, seconds = to_vector(info.arrays), info.metrics["virtual-seconds"]
        seen.append(Seen(theta, seconds, ages, works))  # type: ignore[arg-type]

    clock = Clock(step=1.0, spread=1.0, jitter=0.5, dropout=dropout)
    given = {name: value for name, value in options.items() if name != "make"}
    pace = Buffered(concurrency=concurrency, **values)
    strategy = quiet(
        options["make"], clock=clock, pace=pace, seed=3, callbacks=[note],
        max_unusable_rounds=99, **given,
    )  # fmt: skip
    train(strategy, grid(quadratics(9)), 12)
    expected = played_out(
        12, 9, clock, seed=3, size=pace.size, concurrency=concurrency,
        rho=options.get("rho", 0.0), step=step(),
    )  # fmt: skip
    for found, right in zip(seen, expected, strict=True):
        np.testing.assert_allclose(found.theta, right.theta, rtol=1e-12, atol=1e-12)
        assert found.seconds == pytest.approx(right.seconds, rel=1e-12)
        assert found.ages == right.ages
        assert {i: begun for i, (begun, _) in found.at_work.items()} == {
            i: begun for i, (begun, _) in right.at_work.items()
        }
        for client, (_, since) in right.at_work.items():
            assert found.at_work[client][1] == pytest.approx(since, rel=1e-12)
    assert max(rounds_of(strategy, "oldest-reply")) > 0


@pytest.mark.parametrize("staleness", STALENESS)
def test_age_0_has_weight_1_and_older_replies_have_no_more(staleness: Any) -> None:
    for part in (Buffered(staleness=staleness), Buffered(staleness=staleness, mixing=1.0)):
        weights = [part.weight(age) for age in range(20)]
        assert weights[0] == 1.0
        assert weights == sorted(weights, reverse=True)
        assert weights[-1] > 0.0


# ---- who is asked -------------------------------------------------------------------------------


class Noted(InProcessGrid):
    """Notes who is asked to train in which round, and what was acknowledged then."""

    def __init__(self, clients: int, **options: Any) -> None:
        super().__init__(make_client_app(quadratics(clients)), clients, **options)
        self.asked: list[tuple[int, int]] = []

    def answer(self, message: Message) -> Message | None:
        if message.metadata.message_type == "train":
            config = message.content.config_records["config"]
            number = int(config["server-round"])  # type: ignore[arg-type]
            self.asked.append((number, CLIENT_OF[message.metadata.dst_node_id]))
        return super().answer(message)


@pytest.mark.parametrize("selection", [None, Probabilities(p={0: 5.0, 3: 0.0, 4: 0.0})], ids=str)
@pytest.mark.parametrize("availability", [None, Markov(on=3, off=3)], ids=str)
def test_a_client_at_work_is_never_asked_and_so_many_are_at_work(
    selection: Any, availability: Any
) -> None:
    on = Noted(8)
    at_work: list[set[int]] = [set()]
    used: list[set[int]] = [set()]

    def note(info: RoundInfo) -> None:
        at_work.append(strategy.phases.at_work)
        used.append({*info.clients})

    strategy = quiet(
        FedAvg,
        local=local(epochs=1),
        clock=CLOCK,
        pace=Buffered(size=2, concurrency=4),
        selection=selection,
        availability=availability,
        callbacks=[note],
    )
    train(strategy, on, 20)
    for t in range(1, 21):
        asked = [client for number, client in on.asked if number == t]
        assert len({*asked}) == len(asked)
        assert not {*asked} & at_work[t - 1]
        assert at_work[t] | used[t] == at_work[t - 1] | {*asked}
        assert not at_work[t] & used[t]
        assert len(at_work[t]) < 4
        if availability is None:
            assert len(at_work[t]) == 3  # who is the last to end is replaced after the step
            assert len(used[t]) == 2
    assert max(rounds_of(strategy, "oldest-reply")) > 1


# ---- sums, states, lost replies -----------------------------------------------------------------


@pytest.mark.parametrize("dropout", [0.0, 0.2])
@pytest.mark.parametrize("lost", [0.0, 0.3])
def test_booked_changes_add_up_to_the_clients_states_at_any_time(
    lost: float, dropout: float
) -> None:
    """FedADMM's theta is the mean of the clients' w + y/rho, whatever is late, lost or new."""
    on = grid(quadratics(CLIENTS), fault=drop(lost))

    def check(info: RoundInfo) -> None:
        fields = used_states(on, strategy.ledger.acked)
        u = [np.asarray(f["w"]) + np.asarray(f["y"]) / 0.5 for f in fields]
        u += [START] * (CLIENTS - len(u))
        np.testing.assert_allclose(to_vector(info.arrays), np.mean(u, 0), atol=1e-12)

    clock = Clock(step=1.0, spread=1.0, jitter=0.5, dropout=dropout)
    strategy = quiet(
        FedADMM,
        eta="fraction",
        rho=0.5,
        clock=clock,
        pace=Buffered(size=1, concurrency=4),
        callbacks=[check],
    )
    train(strategy, on, 25)
    assert max(rounds_of(strategy, "oldest-reply")) > 3
    assert sum(rounds_of(strategy, "clients-lost")) > 0 or not lost


def test_a_lost_reply_frees_its_client() -> None:
    def lose(request: Message, reply: Message) -> Message | None:
        trains = request.metadata.message_type == "train"
        first = trains and len(on.asked) < 7
        return None if first and CLIENT_OF[request.metadata.dst_node_id] == 1 else reply

    on = Noted(3, fault=lose)
    strategy = quiet(FedAvg, clock=Clock(step=1.0), pace=Buffered(size=3, concurrency=3))
    train(strategy, on, 5)
    assert [number for number, client in on.asked if client == 1] == [1, 2, 3, 4, 5]
    assert rounds_of(strategy, "clients-used") == [2.0, 2.0, 3.0, 3.0, 3.0]


# ---- the same run -------------------------------------------------------------------------------


def test_a_run_is_the_same_on_nodes_and_hosts_and_in_any_order_of_replies() -> None:
    problems = quadratics(8)
    app = make_client_app(problems, hosts=lambda context: Hosted([*range(8)]))
    plain = make_client_app(problems)
    runs = []
    for on in (grid(problems), InProcessGrid(app, 8, hosts=1), Shuffled(plain, 8)):
        strategy = quiet(FedADMM, **ADMM, pace=Buffered(size=2, concurrency=5), seed=2)
        found = train(strategy, on, 8).tobytes()
        runs.append((found, rounds_of(strategy, "virtual-seconds")))
    assert runs[0] == runs[1] == runs[2]


def test_a_run_is_the_same_however_clients_lie_on_hosts() -> None:
    runs = []
    for shape in SHAPES:
        pace = Buffered(size=2, concurrency=4)
        options: dict[str, Any] = {"pace": pace, "clock": CLOCK, **shared(shape)}
        strategy = quiet(FedAvg, node_wait=0.01, **options)
        found = train(strategy, federation(shape), 4).tobytes()
        runs.append((found, rounds_of(strategy, "virtual-seconds")))
    assert runs == runs[:1] * len(SHAPES)


class Killed(BaseException):
    pass


@some_taken
def test_killed_amid_open_work_it_ends_with_the_undisturbed_model(row: Row, tmp_path: Path) -> None:
    settings = local(solver="sgd", **{"batch-size": 3, "random-epochs": True})

    def run(folder: str, lives: list[int], **how: Any) -> tuple[bytes, list[float]]:
        on = grid(quadratics(CLIENTS))
        for rounds in lives:

            def ends(info: RoundInfo, rounds: int = rounds) -> None:
                if info.server_round > rounds:
                    raise Killed

            given = options(row) | ({} if row.name == "fedsgd" else {"local": settings})
            strategy = row.strategy(
                **given,
                clock=CLOCK,
                pace=Buffered(size=2, concurrency=5),
                checkpoints=Checkpoints(tmp_path / folder, every=2),
                callbacks=[ends],
            )
            with suppress(Killed):
                strategy.start(on, to_record(START), 9, resume=True)
        vector = to_vector(strategy.result.arrays).tobytes()
        return vector, rounds_of(strategy, "virtual-seconds")

    assert run("cut", [3, 6, 99]) == run("whole", [99])


def test_two_starts_are_one_that_is_as_long() -> None:
    pace = Buffered(size=1, concurrency=4)
    one, two = (quiet(FedADMM, **ADMM, pace=pace) for _ in range(2))
    whole = train(one, grid(quadratics(CLIENTS)), 9)
    on = grid(quadratics(CLIENTS))
    half = two.start(on, to_record(START), 5)
    rest = two.start(on, half.arrays, 4)
    np.testing.assert_array_equal(to_vector(rest.arrays), whole)
    assert rounds_of(two, "virtual-seconds") == rounds_of(one, "virtual-seconds")[5:]


def test_clients_that_are_gone_at_the_next_start_are_free() -> None:
    on = Noted(4)
    strategy = quiet(FedAvg, clock=CLOCK, pace=Buffered(size=1, concurrency=4), node_wait=0.01)
    theta = train(strategy, on, 3)
    gone = {*strategy.phases.at_work}
    contexts = copy.copy(on.contexts)
    for node in contexts:
        if CLIENT_OF[node] in gone:
            del on.contexts[node]
    on.asked.clear()
    strategy.start(on, to_record(theta), 1)
    assert not {client for _, client in on.asked} & gone
    on.contexts.update(contexts)
    strategy.start(on, to_record(theta), 2)
    assert gone <= {client for _, client in on.asked}


# ---- what is refused ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"size": 0}, r"size must be an integer >= 1, got 0"),
        ({"size": 5, "concurrency": 4}, r"size must be <= concurrency=4, got 5"),
        ({"concurency": 4}, r"no argument 'concurency' \(did you mean 'concurrency'\?\)"),
        ({"staleness": "old"}, r"staleness must be one of .*, got 'old'"),
        ({"staleness": "constant", "power": 1.0}, 'power needs staleness "polynomial" or "hinge"'),
        ({"grace": 2}, 'grace needs staleness "hinge", got "polynomial"'),
        ({"mixing": 1.5}, r"mixing must be .*<= 1.*, got 1.5"),
        ({"order": "random"}, r"order must be one of \['virtual', 'arrival'\], got 'random'"),
    ],
)
def test_bad_hyperparameters_are_refused_with_bound_and_value(
    values: dict[str, Any], said: str
) -> None:
    with pytest.raises((TypeError, ValueError), match=said):
        Buffered(**values)


@pytest.mark.parametrize(
    ("others", "said"),
    [
        ({"clock": None}, "does not go with no clock: it goes by clock=Clock"),
        ({"pace": Buffered(order="arrival")}, "replies arrive in real time; leave out the clock"),
        ({"selection": lambda round: round.connected}, "a function, which itself says who"),
        ({"min_replies": 11}, "rounds that need 11 replies: use a larger size"),
        ({"combine": Krum(attackers=4)}, "rounds that need 11 replies: use a larger size"),
    ],
)
def test_what_it_does_not_go_with_is_refused(others: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        FedAvg(**{"clock": CLOCK, "pace": Buffered(), **others})


def test_a_recorded_change_is_never_scaled() -> None:
    for weights in ({"mixing": 0.5}, {"staleness": "constant"}, {"power": 1.0}):
        with pytest.raises(ValueError, match="FedADMM, which takes changes whole: leave out"):
            FedADMM(eta="fraction", clock=CLOCK, pace=Buffered(**weights))


@pytest.mark.parametrize("others", [{"eta": 1.0}, {"eta": "fraction", "tracking": "global"}])
def test_other_steps_of_fedadmm_say_what_to_use(others: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match='FedADMM with eta="fraction"'):
        FedADMM(clock=CLOCK, pace=Buffered(), **others)


def test_wrappers_and_legacy_servers_are_refused() -> None:
    strategy = FedAvg(clock=CLOCK, pace=Buffered())
    wrapper = DifferentialPrivacyServerSideFixedClipping(strategy, 0.1, 1.0, 2)
    with pytest.raises(ValueError, match="cannot be run by a wrapper"):
        wrapper.start(grid(quadratics(2)), to_record(START), 1)
    with pytest.raises(ValueError, match=r"pace=Buffered.* has no legacy form"):
        as_legacy(FedAvg(clock=CLOCK, pace=Buffered()), to_record(START))
    with pytest.raises(ValueError, match=r"pace=Deadline.* has no legacy form"):
        as_legacy(FedAvg(pace=Deadline(order="arrival")), to_record(START))
    as_legacy(FedAvg(clock=CLOCK, pace=Deadline()), to_record(START))


# ---- by arrival ---------------------------------------------------------------------------------


def by_arrival(size: int, concurrency: int, **others: Any) -> FederatedStrategy:
    pace = Buffered(size=size, concurrency=concurrency, order="arrival")
    return quiet(FedADMM, eta="fraction", rho=0.5, pace=pace, **others)


@some_taken
@pytest.mark.usefixtures("no_pause")
def test_by_arrival_all_at_work_and_all_waited_for_is_the_synchronous_run(row: Row) -> None:
    pace = Buffered(size=CLIENTS, concurrency=CLIENTS, order="arrival")
    found = train(row.strategy(**options(row), pace=pace), Slow(CLIENTS, {2: 3, 4: 1}), 4)
    assert found.tobytes() == synchronous(row.name)[0]


@pytest.mark.usefixtures("no_pause")
def test_by_arrival_a_slow_client_is_not_waited_for_and_its_late_change_counts() -> None:
    on = Slow(4, {1: 6})
    used: list[set[int]] = []

    def check(info: RoundInfo) -> None:
        used.append({*info.clients})
        fields = used_states(on, strategy.ledger.acked)
        u = [np.asarray(f["w"]) + np.asarray(f["y"]) / 0.5 for f in fields]
        u += [START] * (4 - len(u))
        np.testing.assert_allclose(to_vector(info.arrays), np.mean(u, 0), atol=1e-12)

    strategy = by_arrival(2, 4, callbacks=[check])
    train(strategy, on, 12)
    (late, *_) = [t for t, clients in enumerate(used, start=1) if 1 in clients]
    assert late > 2
    assert [t for t, client in on.asked if client == 1][:2] == [1, late + 1]
    assert rounds_of(strategy, "oldest-reply")[late - 1] == late - 1
    assert rounds_of(strategy, "clients-used") == [2.0] * 12
    assert "virtual-seconds" not in strategy.result.train_metrics_clientapp[1]


@pytest.mark.usefixtures("no_pause")
def test_by_arrival_who_ends_is_replaced_at_once() -> None:
    at_work: list[int] = []

    class Watched(Slow):
        def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
            ids = super().push_messages(messages)
            at_work.append(len([name for name in self._replies if name in self.due]))
            return ids

    on = Watched(7, {i: i for i in range(7)})
    train(by_arrival(3, 4), on, 6)
    asked = [[client for number, client in on.asked if number == t] for t in range(1, 7)]
    assert [len(clients) for clients in asked] == [6, 3, 3, 3, 3, 3]
    assert all(len({*clients}) == len(clients) for clients in asked)
    assert max(at_work) == 4


@pytest.mark.usefixtures("no_pause")
def test_by_arrival_a_round_may_have_no_limit() -> None:
    strategy = by_arrival(2, 3)
    strategy.start(Slow(3, {2: 5}), to_record(START), 3, timeout=None)  # type: ignore[arg-type]
    assert rounds_of(strategy, "clients-used") == [2.0] * 3


@pytest.mark.usefixtures("no_pause")
def test_by_arrival_the_seconds_of_rounds_add_up_to_no_more_than_the_run() -> None:
    ends: list[float] = []
    strategy = by_arrival(1, 4, callbacks=[lambda info: ends.append(time.monotonic())])
    train(strategy, Slow(4, {1: 20}), 12)
    assert sum(rounds_of(strategy, "seconds")[1:]) <= ends[-1] - ends[0]


@pytest.mark.usefixtures("no_pause")
def test_by_arrival_a_round_ends_after_the_timeout_with_those_that_are_there() -> None:
    on = Slow(3, {2: 10**9})
    strategy = by_arrival(3, 3)
    strategy.start(on, to_record(START), 2, timeout=0.2)
    assert rounds_of(strategy, "clients-used") == [2.0, 2.0]
    assert [client for _, client in on.asked] == [0, 1, 2, 0, 1]
    assert strategy.phases.at_work == {2}


@pytest.mark.usefixtures("no_pause")
def test_by_arrival_an_error_reply_frees_its_client() -> None:
    def broken(request: Message, reply: Message) -> Message:
        trains = request.metadata.message_type == "train"
        if trains and request.metadata.dst_node_id == NODES[1]:
            return Message(Error(3, "the node died"), reply_to=request)
        return reply

    on = Slow(3, {}, fault=broken)
    strategy = by_arrival(2, 3)
    train(strategy, on, 3)
    assert strategy.ledger.acked == {0: 3, 2: 3}
    assert [t for t, client in on.asked if client == 1] == [1, 2, 3]
    assert strategy.phases.underway == {}


@pytest.mark.usefixtures("no_pause")
def test_by_arrival_a_hosts_message_brings_all_its_clients() -> None:
    def served(context: Any) -> Hosted:
        first = 3 * int(context.node_config["partition-id"])
        return Hosted([*range(first, first + 3)])

    strategy = by_arrival(2, 6)
    train(strategy, Slow(6, {}, hosts=2, served=served), 4)
    assert rounds_of(strategy, "clients-used") == [3.0] * 4
    assert rounds_of(strategy, "clients-rejected") == [0.0] * 4
