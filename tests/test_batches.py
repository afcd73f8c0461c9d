"""Data in any form that PyTorch takes train as in a plain loop of PyTorch, and are measured so."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from flwr.app import ArrayRecord, Context
from problems import Linear, half_mean_square, oracle_of, quadratics
from tiny_data import distilbert, sentences, tokenizer
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.functional import cross_entropy
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    StackDataset,
    Subset,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)

from clients import (
    AnyAlgorithmClient,
    Border,
    ContextStore,
    FedAvgClient,
    LocalTraining,
    NoFixedSamples,
    Problem,
    client_app,
    client_id,
    solve,
)
from clients.learning.data import TARGETS
from clients.learning.replay import seed_everywhere
from clients.node.in_process import InProcessGrid
from fl_strategies import STRATEGIES, FedAvg, NothingUsable
from fl_strategies.core.randomness import stream
from fl_strategies.core.subproblem import Subproblem

N, SIZE = 7, 3
"""Samples, and those of a mini-batch: the last one has one sample."""
X = torch.tensor(np.random.default_rng(0).normal(size=(N, 5)), dtype=torch.float32).double()
Y = torch.arange(N) % 3
SCALE = torch.linspace(0.5, 2.0, N, dtype=torch.float64)[:, None]
KIND = torch.arange(N) % 4
TWO = Y[:, None] % 2
BOXES = [torch.rand(k, 2, dtype=torch.float64) for k in (0, 2, 1, 0, 3, 1, 0)]
MAPS = torch.tensor(np.random.default_rng(1).normal(size=(N, 1, 4, 4)))


class Net(nn.Module):
    """Its argument has another name than the data's column."""

    def __init__(self, classes: int = 3) -> None:
        super().__init__()
        self.out = nn.Linear(5, classes)

    def forward(self, x: Any) -> Any:
        return self.out(x)


class Scaled(nn.Module):
    """Takes two inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Linear(5, 3)

    def forward(self, x: Tensor, scale: Tensor) -> Tensor:
        out: Tensor = self.out(x * scale)
        return out


class Tabular(Net):
    """Takes one dict, in which integers stay integers."""

    def __init__(self) -> None:
        super().__init__()
        self.kinds = nn.Embedding(4, 5)

    def forward(self, columns: Mapping[str, Tensor]) -> Tensor:
        out: Tensor = self.out(columns["numbers"] + self.kinds(columns["kind"]))
        return out


class Recording(Net):
    """Returns a record, with a loss if it gets labels, as those of transformers."""

    def forward(self, x: Tensor, labels: Tensor | None = None) -> Any:
        logits = self.out(x)
        loss = None if labels is None else cross_entropy(logits, labels)
        return SimpleNamespace(loss=loss, logits=logits, extra=logits.square().mean())


class Listing(Net):
    """Takes tensors of several lengths in a tuple or list."""

    def forward(self, x: Any) -> list[Tensor]:
        assert isinstance(x, tuple | list)
        return [self.out(one.sum(0)) for one in x]


def rows_of(**columns: Any) -> Any:
    return [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]


def pairs(*columns: Any) -> Any:
    return [*zip(*columns, strict=True)]


def hugging_face() -> Any:
    datasets = pytest.importorskip("datasets")
    return datasets.Dataset.from_dict({"img": X.tolist(), "label": Y.tolist()})


def to_tensors(batch: dict[str, Any]) -> dict[str, Any]:
    return batch | {"img": [torch.tensor(one) for one in batch["img"]]}


class Lines(IterableDataset[Any]):
    """Samples that come one after the other, and have no length."""

    def __iter__(self) -> Iterator[Any]:
        yield from zip(X, Y, strict=True)


class Pieces(IterableDataset[Any]):
    """Mini-batches that the Dataset makes itself."""

    def __iter__(self) -> Iterator[Any]:
        yield from zip(X.split(3), Y.split(3), strict=True)


class BatchesWithoutLength:
    def __iter__(self) -> Iterator[list[int]]:
        yield from ([0, 1, 2], [3, 4], [5, 6])


def as_they_are(items: Any) -> Any:
    """As torchvision's references collate what differs in size."""
    return tuple(zip(*items, strict=True))


def per_box(items: Any) -> tuple[Tensor, Tensor]:
    """A row per box, of which a batch may have none."""
    boxes = [F.pad(b, (1, 0), value=float(i)) for i, (_, b) in enumerate(items)]
    return torch.stack([x for x, _ in items]), torch.cat(boxes)


def box_loss(maps: Tensor, boxes: Tensor) -> Tensor:
    """Mean over images."""
    wanted = torch.zeros_like(maps[:, 0])
    cells = (boxes[:, 1:] * maps.shape[-1]).long()
    wanted[boxes[:, 0].long(), cells[:, 1], cells[:, 0]] = 1.0
    return F.binary_cross_entropy_with_logits(maps[:, 0], wanted, reduction="sum") / len(maps)


def listed_loss(outputs: list[Tensor], targets: Any) -> Tensor:
    losses = [(o - y["box"]).square().sum() for o, y in zip(outputs, targets, strict=True)]
    return torch.stack(losses).mean()


class Form(NamedTuple):
    """What a Problem gets, and the plain loop's loss of a batch."""

    data: Callable[[], Any]
    plain: Callable[[Any, Any], Tensor] = lambda net, batch: cross_entropy(net(batch[0]), batch[1])
    loss: Any = cross_entropy
    net: Callable[[], nn.Module] = Net
    options: Mapping[str, Any] = {}
    items: Callable[[], Any] = lambda: TensorDataset(X, Y)
    """The samples, in their order, by which the plain loop trains unless data are a DataLoader."""
    collate: Callable[[Any], Any] = torch.utils.data.default_collate


def by_key(net: Any, batch: Any) -> Tensor:
    return cross_entropy(net(batch["img"]), batch["label"])


def of(loss: Any, net: Any = Net, x: Any = X, y: Any = Y) -> dict[str, Any]:
    """A loss of the module's outputs and targets, as the plain loop writes it."""
    return {"loss": loss, "net": net, "items": lambda: TensorDataset(x, y)}


def moved_by(loss: Any) -> Callable[[Any, Any], Tensor]:
    return lambda net, batch: loss(net(batch[0]), batch[1].double())


def loader(*args: Any, **options: Any) -> Callable[[], Any]:
    return lambda: DataLoader(TensorDataset(X, Y), *args, **options)


RARE = partial(
    F.binary_cross_entropy_with_logits, pos_weight=torch.tensor([4.0], dtype=torch.float64)
)
ONE = partial(Net, 1)
MAPPING: dict[str, Any] = {"plain": by_key, "items": lambda: rows_of(img=X, label=Y)}
LABELLED: dict[str, Any] = {
    "net": Recording,
    "items": lambda: rows_of(x=X, labels=Y),
    "loss": lambda o, y: o.loss + o.extra,
    "plain": lambda net, batch: net(**batch).loss + net(**batch).extra,
}
COLUMNS: Any = {"scale": SCALE, "x": X, "label": Y}
DICTS = pairs(rows_of(numbers=X, kind=KIND), Y)
SIZES = pairs([X[: 1 + i % 3] for i in range(N)], rows_of(box=X[:, :3]))

FORMS: dict[str, Form] = {
    # tensors
    "tensors in a tuple": Form(lambda: (X, Y)),
    "NumPy, float32 and uint8": Form(lambda: (X.numpy().astype("f4"), Y.numpy().astype("u1"))),
    "a mapping with a text": Form(lambda: {"img": X, "label": Y, "file": [*"abcdefg"]}),
    "a mapping of lists": Form(lambda: {"img": X.tolist(), "label": Y.tolist()}),
    "TensorDataset": Form(lambda: TensorDataset(X, Y)),
    # Datasets
    "pairs": Form(lambda: pairs(X.numpy(), Y.tolist())),
    "Subset": Form(lambda: Subset(TensorDataset(X, Y), range(N))),
    "mappings with a text": Form(lambda: rows_of(img=X, label=Y, file=[*"abcdefg"])),
    "Hugging Face": Form(hugging_face),
    "Hugging Face, numpy": Form(lambda: hugging_face().with_format("numpy")),
    "Hugging Face, transform": Form(lambda: hugging_face().with_transform(to_tensors)),
    # DataLoaders
    "loader": Form(loader(SIZE)),
    "loader, shuffled": Form(loader(SIZE, shuffle=True)),
    "loader, sampler": Form(loader(SIZE, sampler=SubsetRandomSampler(range(N)))),
    "loader, list of batches": Form(
        loader(batch_sampler=[[3, 1], [0, 2, 4, 5], [6]]), options={"samples": N}
    ),
    "loader, batch_sampler": Form(loader(batch_sampler=BatchSampler(RandomSampler(Y), 2, False))),
    "loader, iterable": Form(lambda: DataLoader(Lines(), SIZE), options={"samples": N}),
    "loader, workers": Form(loader(SIZE, shuffle=True, num_workers=2)),
    "loader, mappings": Form(
        lambda: DataLoader(rows_of(img=X, label=Y), SIZE, shuffle=True), **MAPPING
    ),
    "loader, Hugging Face": Form(
        lambda: DataLoader(hugging_face().with_format("torch"), SIZE),
        lambda net, batch: cross_entropy(net(batch["img"].double()), batch["label"]),
        items=MAPPING["items"],
    ),
    "loader, batches of the Dataset": Form(
        lambda: DataLoader(pairs(torch.split(X, 4), torch.split(Y, 4)), None, shuffle=True),
        options={"samples": N},
    ),
    # what modules take
    "a dict": Form(lambda: DICTS, net=Tabular, items=lambda: DICTS),
    "a dict by name": Form(
        lambda: rows_of(columns=[d for d, _ in DICTS], label=Y), net=Tabular, items=lambda: DICTS
    ),
    "two tensors by place": Form(
        lambda: TensorDataset(X, SCALE, Y),
        lambda net, batch: cross_entropy(net(batch[0], batch[1]), batch[2]),
        net=Scaled,
        items=lambda: TensorDataset(X, SCALE, Y),
    ),
    "two tensors by name": Form(
        lambda: StackDataset(**COLUMNS),
        lambda net, batch: cross_entropy(net(batch["x"], batch["scale"]), batch["label"]),
        net=Scaled,
        items=lambda: rows_of(**COLUMNS),
    ),
    "tensors of several sizes, targets in dicts": Form(
        lambda: DataLoader(SIZES, SIZE, collate_fn=as_they_are),
        lambda net, batch: listed_loss(net(batch[0]), batch[1]),
        listed_loss,
        Listing,
        items=lambda: SIZES,
        collate=as_they_are,
    ),
    # what losses take
    "a module that gets its labels": Form(lambda: rows_of(x=X, labels=Y), **LABELLED),
    "a loss that reads a record": Form(
        lambda: (X, Y),
        lambda net, b: cross_entropy((o := net(b[0])).logits, b[1]) + o.extra,
        lambda o, y: cross_entropy(o.logits, y) + o.extra,
        Recording,
    ),
    "a row per box": Form(
        lambda: DataLoader(pairs(MAPS, BOXES), SIZE, collate_fn=per_box),
        lambda net, batch: box_loss(net(batch[0]), batch[1]),
        box_loss,
        lambda: nn.Conv2d(1, 1, 3, padding=1),
        items=lambda: pairs(MAPS, BOXES),
        collate=per_box,
    ),
    "integers in a binary cross-entropy": Form(
        lambda: (X, TWO), moved_by(RARE), **of(RARE, ONE, X, TWO)
    ),
    "booleans, fetched": Form(
        lambda: pairs(X, TWO.bool()), moved_by(RARE), **of(RARE, ONE, X, TWO)
    ),
    "integers in a squared error": Form(
        lambda: (X, TWO), moved_by(F.mse_loss), **of(nn.MSELoss(), ONE, X, TWO)
    ),
}


def made(make: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return make().double()


def trained(problem: Problem, seed: int = 1, **settings: Any) -> Tensor:
    training = LocalTraining(**{"lr": 0.1, "epochs": 2, "batch_size": SIZE, **settings})
    start = problem.model.vector
    w: Tensor = solve(problem, start, Subproblem(), training, stream(seed, "t")).w
    problem.model.write(start)
    return w


def by_torch(form: Form) -> Tensor:
    """Return the parameters after a plain loop, whose draws are those of the client's stream."""
    net, rng = made(form.net).train(), stream(1, "t")
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    of_pytorch = form.data()
    for _ in range(2):
        batches: Any = of_pytorch
        if isinstance(of_pytorch, DataLoader):
            seed_everywhere(int(rng.integers(2**63)))
        else:
            order = rng.permutation(N).tolist()
            cut = [order[first : first + SIZE] for first in range(0, N, SIZE)]
            batches = DataLoader(form.items(), batch_sampler=cut, collate_fn=form.collate)
            if not tensors_are_cut(of_pytorch):
                rng.integers(2**63)  # the seed of what fetching draws
        for batch in batches:
            optimizer.zero_grad()
            torch.autograd.backward(form.plain(net, batch))
            optimizer.step()
    return nn.utils.parameters_to_vector(net.parameters()).detach()


def tensors_are_cut(data: Any) -> bool:
    return isinstance(data, tuple | dict) or (
        isinstance(data, TensorDataset) and len(data.tensors) == 2
    )


@pytest.mark.filterwarnings("ignore:This process")  # Python 3.12, of workers that are forked
@pytest.mark.parametrize("name", FORMS)
def test_a_form_of_data_trains_and_is_measured_as_in_a_plain_loop(name: str) -> None:
    form = FORMS[name]
    problem = Problem(made(form.net), form.loss, form.data(), **form.options)
    assert len(problem) == N
    torch.testing.assert_close(trained(problem), by_torch(form), rtol=1e-12, atol=1e-14)
    net = made(form.net).eval()
    singles = [form.plain(net, form.collate([item])).item() for item in form.items()]
    assert problem.evaluate().loss == pytest.approx(np.mean(singles), rel=1e-12)


def test_rows_are_the_clients_samples() -> None:
    chosen = [5, 0, 2, 4]
    expected = trained(Problem(made(Net), cross_entropy, X[chosen], Y[chosen]))
    for rows in (chosen, np.array(chosen, np.int32), torch.tensor(chosen)):
        problem = Problem(made(Net), cross_entropy, (X, Y), rows=rows)
        assert torch.equal(trained(problem), expected)
    with pytest.raises(ValueError, match=r"rows choose .* of a Dataset, Subset\(data, rows\) does"):
        Problem(made(Net), cross_entropy, pairs(X, Y), rows=chosen)


def test_the_targets_are_found_where_there_is_one_candidate() -> None:
    expected = trained(Problem(made(Net), cross_entropy, pairs(X, Y)))
    for name in TARGETS:
        problem = Problem(made(Net), cross_entropy, rows_of(**{"img": X, name: Y}))
        assert torch.equal(trained(problem), expected)
    for data, target in (
        (rows_of(img=X, label=Y, y=Y), None),
        (rows_of(img=X, fine=Y), None),
        (rows_of(img=X, label=Y), "fine"),
    ):
        with pytest.raises(ValueError, match=r"a batch has \['img', .*name them by target=\.\.\."):
            Problem(made(Net), cross_entropy, data, target=target).evaluate()
    both = rows_of(img=X, label=[*"abcdefg"], fine=Y)
    assert torch.equal(trained(Problem(made(Net), cross_entropy, both, target="fine")), expected)


@pytest.mark.parametrize(
    "data",
    [
        lambda: DataLoader(Lines(), SIZE, drop_last=True),
        lambda: DataLoader(Pieces(), None),
        loader(batch_sampler=BatchesWithoutLength()),
    ],
    ids=["drop_last", "batches of the Dataset", "batch sampler"],
)
@pytest.mark.parametrize("steps", [2, 17])
def test_as_many_steps_are_taken_as_asked_for_where_a_loader_has_no_length(
    data: Callable[[], Any], steps: int
) -> None:
    problem = Problem(made(Net), cross_entropy, data(), samples=10 * N)
    training = LocalTraining(steps=steps, lr=0.01)
    solved = solve(problem, problem.model.vector, Subproblem(), training, np.random.default_rng(0))
    assert solved.steps == steps


@pytest.mark.parametrize(
    ("data", "options", "said"),
    [
        (lambda: X, {}, "data must be inputs and targets, .*got data without targets: Tensor"),
        (lambda: X.numpy(), {}, "got data without targets: ndarray"),
        (Lines, {"samples": N}, "got an iterable: Lines"),
        (lambda: DataLoader(Lines(), SIZE), {}, "samples must be given: the DataLoader does not"),
        (loader(batch_sampler=[[0, 1]]), {}, "samples must be given: the DataLoader does not"),
        (
            lambda: DataLoader(pairs([X], [Y]), None),
            {},
            "samples must be given: the DataLoader does not",
        ),
        (list, {}, "needs a sample at least, got 0"),
        (lambda: (X, Y[:2]), {}, "as many inputs as targets and at least one, got 7 and 2"),
        (lambda: {"a": X, "b": X, "y": Y}, {}, "data have 2 inputs: give a Dataset of them"),
        (lambda: TensorDataset(X), {}, "an autoencoder has its inputs as targets, too"),
        (lambda: TensorDataset(X[:0], Y[:0]), {}, "at least one, got 0 and 0$"),
        (lambda: DataLoader(TensorDataset(X[:0], Y[:0])), {"samples": 2}, "has no samples"),
    ],
)
def test_data_that_cannot_be_batches_are_refused(
    data: Callable[[], Any], options: dict[str, Any], said: str
) -> None:
    with pytest.raises(ValueError, match=said):
        Problem(made(Net), cross_entropy, data(), **options).evaluate()


def test_samples_of_a_loader_are_those_that_its_sampler_takes() -> None:
    for drawn, count in (
        ({"sampler": SubsetRandomSampler(range(3))}, 3),
        ({"sampler": WeightedRandomSampler([1.0] * N, 9)}, 9),
        ({"batch_sampler": BatchSampler(SubsetRandomSampler(range(4)), 2, True)}, 4),
    ):
        assert len(Problem(made(Net), cross_entropy, loader(**drawn)())) == count


# ---- sizes of batches ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ({}, ""),
        ({"batch-size": SIZE}, ""),
        ({"batch-size": 5}, "batch_size = 3, and local asks for 5: leave batch-size out"),
        ({"batch-size": 0}, "batch_size = 3, and local asks for the full batch"),
        ({"solver": "gd"}, "batch_size = 3, and local asks for the full batch"),
    ],
)
def test_a_loaders_batch_size_holds_and_another_one_is_refused(
    asked: dict[str, Any], said: str
) -> None:
    problem = Problem(made(Net), cross_entropy, loader(SIZE)())
    client = FedAvgClient(problem, client_id=0)
    arrays = problem.model.arrays(problem.model.vector)
    request = {"lr": 0.1, "epochs": 2, **asked}
    if said:
        with pytest.raises(ValueError, match=f"a DataLoader makes its own mini-batches, .*{said}"):
            client.fit(arrays, request)
        return
    client.fit(arrays, request)
    settings = LocalTraining(epochs=2)
    assert problem.most_steps(problem.settings(settings, request)) == 2 * math.ceil(N / SIZE)


@pytest.mark.parametrize("size", [1, 2, 3, 7, 9])
def test_pieces_of_a_batch_add_up_to_it_for_a_mean_loss(size: int) -> None:
    data = pairs(X, Y)
    whole, cut = (Problem(made(Net), cross_entropy, data, micro_batch=most) for most in (0, size))
    passes: list[int] = []
    cut.model.module.register_forward_pre_hook(lambda _, args: passes.append(len(args[0])))
    for settings in ({}, {"batch_size": 0}, {"momentum": 0.9}, {"solver": "adam"}):
        torch.testing.assert_close(
            trained(cut, **settings), trained(whole, **settings), rtol=1e-12, atol=1e-14
        )
    assert max(passes) <= size
    boxes = Problem(
        made(lambda: nn.Conv2d(1, 1, 3, padding=1)),
        box_loss,
        DataLoader(pairs(MAPS, BOXES), 4, collate_fn=per_box),
        micro_batch=2,
    )
    with pytest.raises(ValueError, match="micro_batch = 2 cuts tensors with a row for each sample"):
        trained(boxes)


# ---- stored samples -----------------------------------------------------------------------------


class Normalising(Net):
    """Normalises its inputs where they lie, which a second time would do more."""

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.out(x.sub_(0.3).mul_(1.7).requires_grad_())
        return out


class Shifted(Net):
    """What ``Normalising`` computes."""

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.out((x - 0.3) * 1.7)
        return out


def forgetful(outputs: Tensor, targets: Tensor) -> Tensor:
    loss = cross_entropy(outputs, targets.clone())
    targets.zero_()
    return loss


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"batch_size": 0},
        {"sam": 0.1},
        {"variance_reduction": "svrg"},
        {"solver": "lbfgs", "solver_params": "max_iter=4"},
        {"solver": "delta-sgd", "lr": None},
    ],
    ids=str,
)
@pytest.mark.parametrize("form", [lambda x, y: (x, y), pairs], ids=["cut", "fetched"])
def test_what_is_stored_never_reaches_a_module_that_could_write_into_it(
    form: Callable[..., Any], settings: dict[str, Any]
) -> None:
    x, y = X.clone(), Y.clone()
    problem = Problem(made(Normalising), forgetful, form(x, y))
    other = Problem(made(Shifted), cross_entropy, form(x, y))
    if settings.get("variance_reduction") and problem.fetches:
        return  # which needs fixed samples
    found, expected = (trained(one, **settings) for one in (problem, other))
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-14)
    assert problem.evaluate().loss == pytest.approx(other.evaluate().loss, rel=1e-12)
    if not problem.fetches:
        oracles = [oracle_of(one) for one in (problem, other)]
        vectors = [one.difference(expected, 0 * expected, samples=3).vector for one in oracles]
        torch.testing.assert_close(*vectors, rtol=1e-12, atol=1e-14)
        steps = [one.solve_on_next(expected, Subproblem(), steps=3).w for one in oracles]
        torch.testing.assert_close(*steps, rtol=1e-12, atol=1e-14)
    assert torch.equal(x, X)
    assert torch.equal(y, Y)
    assert not x.requires_grad


# ---- what fetching draws ------------------------------------------------------------------------

(QUADRATIC,) = quadratics(1)


class Noisy(Dataset[Any]):
    """Samples that change each time, by torch's, NumPy's and Python's generators."""

    def __len__(self) -> int:
        return N

    def __getitem__(self, i: int) -> tuple[Tensor, Tensor]:
        noise = torch.rand(()) + np.random.rand() + random.random()  # noqa: NPY002
        return torch.tensor(QUADRATIC.X[i]) * (1 + 0.1 * noise), torch.tensor(QUADRATIC.y[i])


def noisy(**options: Any) -> Callable[[], Any]:
    return lambda: DataLoader(Noisy(), **options)


def own() -> torch.Generator:
    return torch.Generator().manual_seed(random.randrange(99))


@pytest.mark.filterwarnings("ignore:This process")
@pytest.mark.parametrize(
    "data",
    [
        Noisy,
        noisy(batch_size=SIZE, shuffle=True),
        noisy(batch_size=SIZE, num_workers=2),
        lambda: DataLoader(Noisy(), SIZE, shuffle=True, generator=own()),
        lambda: DataLoader(Noisy(), SIZE, sampler=RandomSampler(Noisy(), generator=own())),
        lambda: DataLoader(
            Noisy(), batch_sampler=BatchSampler(RandomSampler(Noisy(), generator=own()), 3, False)
        ),
    ],
    ids=["dataset", "loader", "workers", "generator", "sampler", "batch sampler"],
)
def test_what_fetching_draws_derives_from_the_clients_stream_and_leaves_no_trace(
    data: Callable[[], Any],
) -> None:
    def states() -> list[Any]:
        return [torch.get_rng_state().tolist(), random.getstate(), str(np.random.get_state())]  # noqa: NPY002

    problem = Problem(Linear(), half_mean_square, data())
    found = []
    for seed in (7, 8):  # wherever the generators stand
        seed_everywhere(seed)
        before = states()
        found.append((trained(problem, lr=0.05), problem.evaluate().loss))
        assert states() == before
    assert torch.equal(found[0][0], found[1][0])
    assert found[0][1] == found[1][1]
    assert not torch.equal(trained(problem, seed=2, lr=0.05), found[0][0])


@pytest.mark.filterwarnings("ignore:This process")
def test_the_order_is_the_same_whatever_the_workers() -> None:
    found = [
        trained(Problem(made(Net), cross_entropy, loader(SIZE, shuffle=True, num_workers=n)()))
        for n in (0, 2)
    ]
    assert torch.equal(*found)


def test_what_needs_the_same_samples_twice_is_refused_with_the_reason() -> None:
    problem = Problem(Linear(), half_mean_square, Noisy())
    oracle, w = oracle_of(problem), problem.model.vector
    with pytest.raises(NoFixedSamples, match="for a full gradient: a Dataset or DataLoader gives"):
        oracle.full_gradient(w)
    with pytest.raises(NoFixedSamples, match="from a Dataset or DataLoader none can be drawn"):
        oracle.difference(w, w, samples=2)
    for settings in ({"residual": 0.0}, {"variance_reduction": "svrg"}):
        with pytest.raises(NoFixedSamples, match="gives no fixed samples, tensors do"):
            trained(problem, **settings)
    assert np.isfinite(oracle.loss(w))
    assert oracle.gradient(w).vector.shape == w.shape


@pytest.mark.parametrize("name", STRATEGIES)
def test_every_algorithm_trains_on_a_dataset_or_says_why_not(name: str) -> None:
    model = Border(Linear(), head="out")
    problem = Problem(model, half_mean_square, Noisy())

    def client_fn(context: Context) -> AnyAlgorithmClient:
        me, store = client_id(context), ContextStore(context)
        return AnyAlgorithmClient(problem, client_id=me, store=store)

    of_any = {} if name in ("fedsgd", "proxskip") else {"steps": 3, "batch-size": 3}
    settings = {"lr": 0.01} | of_any
    used = settings if STRATEGIES[name].uses_local else {}
    strategy = STRATEGIES[name](fraction_evaluate=0.0, local=used, **model.layout_options)
    initial = ArrayRecord(model.state_dict())
    grid = InProcessGrid(client_app(client_fn), 2)
    if name in ("moon", "fedpd-vr", "fedadmm-insa"):
        with pytest.raises(NothingUsable, match="a Dataset or DataLoader"):
            strategy.start(grid, initial, 3)
        return
    result = strategy.start(grid, initial, 1)
    assert result.train_metrics_clientapp[1]["clients-used"] == 2
    assert all(np.isfinite(array.numpy()).all() for array in result.arrays.values())


class Reads(Dataset[Any]):
    """Counts how often its items are computed."""

    def __init__(self) -> None:
        self.reads = 0

    def __len__(self) -> int:
        return N

    def __getitem__(self, i: int) -> tuple[Tensor, Tensor]:
        self.reads += 1
        return X[i], Y[i]


@pytest.mark.parametrize("form", [lambda data: data, lambda data: DataLoader(data, SIZE)])
def test_samples_are_read_for_what_needs_them(form: Callable[[Any], Any]) -> None:
    data, model = [Reads(), Reads()], Border(made(Net))

    def client() -> FedAvgClient:
        train, test = (Problem(model, cross_entropy, form(one)) for one in data)
        return FedAvgClient(train, client_id=0, test=test)

    arrays = client().get_parameters({})
    assert client().get_properties({"describe": True})
    assert [one.reads for one in data] == [0, 0]
    request = {"server-round": 1, "lr": 0.1, "epochs": 1, "batch-size": SIZE}
    client().fit(arrays, request)
    assert [one.reads for one in data] == [N, 0]
    client().evaluate(arrays, request)
    assert [one.reads for one in data] == [N, N]


@pytest.mark.parametrize("lr", [0.1, 1e30])
@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("where", ["inputs", "targets", "neither"])
@pytest.mark.parametrize("fetched", [False, True])
def test_a_model_that_training_makes_infinite_is_told_from_bad_samples(
    where: str, bad: float, lr: float, fetched: bool
) -> None:
    data = {"inputs": X.clone(), "targets": X[:, :1].clone()}
    if where in data:
        data[where][2, 0] = data[where][5, 0] = bad
    given = (pairs(*data.values()),) if fetched else (*data.values(),)
    problem = Problem(made(ONE).float(), F.mse_loss, *given)
    client = FedAvgClient(problem, client_id=0, training=LocalTraining(lr=lr, steps=9))
    arrays = problem.model.arrays(problem.model.vector)
    if where == "neither" and lr == 0.1:
        assert np.isfinite(client.fit(arrays, {})[0][0]).all()
        return
    told = where in data and not fetched
    why = f"{where} have NaN or infinity in 2 of 7" if told else "training diverged, with lr = "
    with pytest.raises(ValueError, match=f"^the trained model is not finite: {why}"):
        client.fit(arrays, {})


# ---- accuracy -----------------------------------------------------------------------------------


class Same(nn.Module):
    """Returns what it gets."""

    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.bias


WORDS = [[[1.0, 0.0], [0.0, 3.0], [4.0, 2.0]], [[0.0, 1.0], [2.0, 0.0], [1.0, 3.0]]]
"""Scores [n, words, classes]: the likeliest classes are 0 1 0 and 1 0 1."""
TAGS = torch.tensor(WORDS).transpose(1, 2).tolist()


@pytest.mark.parametrize(
    ("outputs", "targets", "ignored", "accuracy"),
    [
        ([[0.0, 1.0], [3.0, 1.0]], [1, 1], -100, 0.5),
        ([[0.0, 1.0], [3.0, 1.0]], [1, 7], 7, 1.0),
        ([[[0.0, 2.0], [1.0, 1.0]], [[5.0, 2.0], [1.0, 3.0]]], [[1, 0], [1, 1]], -100, 0.75),
        ([[2.0], [1.0]], [1, 0], -100, math.nan),  # one logit for two classes
        ([[2.0], [1.0]], [[1], [0]], -100, math.nan),
        ([2.0, 1.0], [1, 0], -100, math.nan),
        ([[2.0, 1.0, 3.0], [1.0, 1.0, 2.0]], [[1, 0, 1], [0, 0, 1]], -100, math.nan),
        (TAGS, [[0, 1, -100], [0, -100, -100]], -100, 0.5),
        (TAGS, [[0, 0, -100], [-100, -100, -100]], -100, 0.5),  # the second has no label
        (TAGS, [[-100, -100, -100], [-100, -100, -100]], -100, math.nan),
        (TAGS, [[0, 1, 1], [1, 1, 0]], 1, 0.5),
        (TAGS, [[0, 1, 0], [1, 1, 1]], 0, (1 + 2 / 3) / 2),
    ],
)
def test_accuracy_is_a_share_of_a_samples_targets_or_there_is_none(
    outputs: Any, targets: Any, ignored: int, accuracy: float
) -> None:
    class Loss(nn.Module):
        ignore_index = ignored

        def forward(self, o: Tensor, y: Tensor) -> Tensor:
            return o.sum()

    x, y = torch.tensor(outputs), torch.tensor(targets)
    for data in ((x, y), pairs(x, y)):
        problem = Problem(Same(), Loss(), data)
        found = solve(
            problem, torch.zeros(1), Subproblem(), LocalTraining(), stream(1, "solve")
        ).accuracy
        for measured in (problem.evaluate().accuracy, float(found)):
            assert measured == pytest.approx(accuracy, nan_ok=True)


class Tagger(nn.Module):
    """Scores [n, classes, words] of sentences [n, words]."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(9, 3)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.words(x).transpose(1, 2)
        return out


def padded(items: list[Tensor]) -> tuple[Tensor, Tensor]:
    pad = partial(nn.utils.rnn.pad_sequence, batch_first=True)
    return pad(items), pad([one % 3 for one in items], padding_value=-100)


def test_batches_of_sentences_may_be_padded_to_different_lengths() -> None:
    rng = torch.Generator().manual_seed(3)
    texts: Any = [torch.randint(1, 9, (2 + n % 5,), generator=rng) for n in range(N)]
    module, data = made(Tagger), DataLoader(texts, 2, collate_fn=padded)
    shares = [float((module(t[None]).argmax(1) == t % 3).double().mean()) for t in texts]
    problem = Problem(module, cross_entropy, data)
    training = LocalTraining(lr=1e-30)
    found = solve(problem, problem.model.vector, Subproblem(), training, stream(1, "solve"))
    assert float(found.accuracy) == pytest.approx(np.mean(shares), rel=1e-6)
    assert problem.evaluate().accuracy == pytest.approx(np.mean(shares), rel=1e-6)
    measured = Problem(module, cross_entropy, data, metrics=lambda o, y: {"n": len(o)})
    with pytest.raises(ValueError, match="metrics need outputs of one shape in all batches"):
        measured.evaluate()


@pytest.mark.parametrize("autocast", [None, torch.bfloat16])
def test_outputs_in_a_tuple_have_no_accuracy_and_those_in_a_record_that_of_its_logits(
    autocast: torch.dtype | None,
) -> None:
    class Twice(Net):
        def forward(self, x: Tensor) -> Any:
            return self.out(x), self.out(2 * x)

    def loss(o: Any, y: Tensor) -> Tensor:
        first, second = o
        return cross_entropy(first, y) + torch.mean(second**2)

    problem = Problem(made(Twice).float(), loss, X, Y, autocast=autocast)
    net = made(Twice).float()
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, enabled=autocast is not None):
        expected = loss(net(X.float()), Y)
    before = problem.evaluate()
    assert before.loss == pytest.approx(expected.item(), rel=1e-6)
    assert math.isnan(before.accuracy)
    problem.model.write(trained(problem, lr=0.01))
    assert problem.evaluate().loss < before.loss
    recorded = Problem(made(Recording), lambda o, y: cross_entropy(o.logits, y), X, Y)
    right = made(Net)(X).argmax(1) == Y
    assert recorded.evaluate().accuracy == pytest.approx(float(right.double().mean()))


# ---- torchvision and transformers ---------------------------------------------------------------


class Images(Dataset[Any]):
    """Eight images, cropped, mirrored and erased at random."""

    def __init__(self) -> None:
        from torchvision.transforms import v2  # here: it takes seconds

        rng = np.random.default_rng(0)
        self.images = torch.tensor(rng.random((8, 3, 12, 12), np.float32))
        self.labels = torch.arange(8) % 3
        self.transform = v2.Compose(
            [v2.RandomCrop(8, padding=1), v2.RandomHorizontalFlip(), v2.RandomErasing(p=0.8)]
        )

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, i: int) -> tuple[Tensor, Tensor]:
        return self.transform(self.images[i]), self.labels[i]


def test_torchvisions_random_transforms_are_the_same_on_every_engine_and_worker() -> None:
    """Two runs in one process, begun with other states of the generators, to the bit."""
    data = Images()

    def run(seed: int, state: int) -> Any:
        torch.manual_seed(state)
        torch.manual_seed(0)
        module = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(144, 3))
        model = Border(module)
        problem = Problem(model, cross_entropy, data)
        torch.manual_seed(state)

        def client_fn(context: Context) -> AnyAlgorithmClient:
            return AnyAlgorithmClient(problem, client_id=client_id(context), test=problem)

        settings = {"lr": 0.1, "epochs": 2, "batch-size": 3}
        strategy = FedAvg(seed=seed, local=settings, **model.layout_options)
        grid = InProcessGrid(client_app(client_fn), 2)
        result = strategy.start(grid, ArrayRecord(model.state_dict()), 2)
        arrays = [array.numpy() for array in result.arrays.values()]
        accuracy: Any = result.train_metrics_clientapp[2]["train-accuracy"]
        assert 0.0 <= accuracy <= 1.0
        return arrays, dict(result.evaluate_metrics_clientapp[2])

    (first, measured), (same, again), (other, _) = run(1, 5), run(1, 6), run(2, 5)
    for a, b in zip(first, same, strict=True):
        np.testing.assert_array_equal(a, b)
    assert measured["eval-loss"] == again["eval-loss"]
    assert any(not np.array_equal(a, b) for a, b in zip(first, other, strict=True))


@pytest.mark.slow
def test_a_tokenizers_batches_train_a_transformer_as_in_a_plain_loop(tmp_path: Path) -> None:
    """Texts of different lengths, padded batch by batch; random weights; the head is trained."""
    from transformers import AutoTokenizer, DistilBertConfig, DistilBertForSequenceClassification

    words = AutoTokenizer.from_pretrained(str(tokenizer(tmp_path / "words")))
    folder = distilbert(tmp_path / "bert", dropout=0.0)
    texts = [*zip(sentences(10), (torch.arange(10) % 2).tolist(), strict=True)]

    def collate(items: list[tuple[str, int]]) -> Any:
        batch = words([text for text, _ in items], padding=True, return_tensors="pt")
        batch["labels"] = torch.tensor([label for _, label in items])
        return batch

    def module() -> nn.Module:
        config = DistilBertConfig.from_pretrained(str(folder))
        torch.manual_seed(2)
        return DistilBertForSequenceClassification(config).double()

    batches: Any = DataLoader(texts, 4, shuffle=True, collate_fn=collate)  # type: ignore[arg-type]
    model = Border(module(), train=["pre_classifier", "classifier"])
    assert model.layout.frozen.keys() >= {"distilbert.embeddings.word_embeddings.weight"}
    found = trained(Problem(model, lambda o, y: o.loss, batches), lr=0.3)

    twin, rng = module().train(), stream(1, "t")
    head = [p for n, p in twin.named_parameters() if not n.startswith("distilbert")]
    optimizer = torch.optim.SGD(head, lr=0.3)
    for _ in range(2):
        seed_everywhere(int(rng.integers(2**63)))
        for batch in batches:
            optimizer.zero_grad()
            twin(**batch).loss.backward()
            optimizer.step()
    for name, array in zip(model.names, model.arrays(found), strict=True):
        np.testing.assert_allclose(array, twin.state_dict()[name].numpy(), rtol=1e-9, atol=1e-12)
