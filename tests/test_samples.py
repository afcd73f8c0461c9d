"""Samples in any form that people have train as their tensors do, or the mistake is named."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, mse_loss
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from clients import FedAvgClient, FlatModel, LocalTraining, Problem, StreamedProblem, solve
from clients.learning.samples import TARGETS
from fl_strategies.core.randomness import stream
from fl_strategies.core.subproblem import Subproblem

X = torch.tensor(np.random.default_rng(0).normal(size=(7, 5)), dtype=torch.float32)
Y = torch.arange(7) % 3


class Net(nn.Module):
    """Its argument has another name than the data's column."""

    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.out(x)
        return out


def model(make: Callable[[], nn.Module] = Net) -> FlatModel:
    torch.manual_seed(0)
    return FlatModel(make())


def rows_of(**columns: Any) -> list[dict[str, Any]]:
    return [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]


def hugging_face(x: Any = X, y: Any = Y) -> Any:
    datasets = pytest.importorskip("datasets")
    return datasets.Dataset.from_dict({"img": x.tolist(), "label": y.tolist()})


def transformed(batch: dict[str, Any]) -> dict[str, Any]:
    batch["img"] = [torch.tensor(one) for one in batch["img"]]
    return batch


DATASETS: dict[str, Callable[[], Any]] = {
    "of tuples": lambda: TensorDataset(X, Y),
    "of mappings": lambda: rows_of(img=X, label=Y),
    "a list of pairs": lambda: [*zip(X.numpy(), Y.tolist(), strict=True)],
    "with a text": lambda: rows_of(img=X, label=Y, file=[*"abcdefg"]),
    "Hugging Face": hugging_face,
    "Hugging Face, with_format": lambda: hugging_face().with_format("numpy"),
    "Hugging Face, with_transform": lambda: hugging_face().with_transform(transformed),
}
LOADERS = {f"a loader {name}": lambda f=f: DataLoader(f(), 3) for name, f in DATASETS.items()
           if name != "Hugging Face"}  # fmt: skip


def trained(problem: Any, batch_size: int = 3) -> Tensor:
    start = problem.model.vector.clone()
    training = LocalTraining(lr=0.1, batch_size=batch_size)
    w: Tensor = solve(problem, start, Subproblem(), training, stream(1, "t")).w
    return w


@pytest.mark.parametrize("form", DATASETS)
def test_a_dataset_in_any_form_trains_as_its_tensors_do(form: str) -> None:
    wanted = trained(Problem(model(), cross_entropy, X, Y))
    data = DATASETS[form]()
    for problem in (
        Problem(model(), cross_entropy, data),
        StreamedProblem(model(), cross_entropy, data),
    ):
        assert problem.classifies
        assert len(problem) == len(X)
        torch.testing.assert_close(trained(problem), wanted, rtol=0, atol=1e-6)


@pytest.mark.parametrize("form", LOADERS)
def test_a_loader_in_any_form_trains_as_its_tensors_do(form: str) -> None:
    tensors = Problem(model(), cross_entropy, X, Y)
    loaded = Problem(model(), cross_entropy, LOADERS[form]())
    assert torch.equal(trained(loaded), trained(tensors))
    wanted = trained(StreamedProblem(model(), cross_entropy, DataLoader(TensorDataset(X, Y), 3)))
    assert torch.equal(trained(StreamedProblem(model(), cross_entropy, LOADERS[form]())), wanted)


ARRAYS: dict[str, tuple[Any, ...]] = {
    "NumPy": (X.numpy(), Y.numpy()),
    "lists": (X.tolist(), Y.tolist()),
    "lists of tensors": ([*X], [*Y]),
    "float64 and int32": (X.double().numpy(), Y.numpy().astype(np.int32)),
    "big-endian and uint16": (X.numpy().astype(">f4"), Y.numpy().astype(np.uint16)),
    "backwards": (X.flip(0).numpy()[::-1], Y.flip(0).numpy()[::-1]),
    "a pair": ((X.numpy(), Y.to(torch.uint8)),),
    "a mapping": ({"img": X.numpy(), "label": Y.tolist(), "file": [*"abcdefg"]},),
}


@pytest.mark.parametrize("form", ARRAYS)
def test_arrays_of_any_kind_train_as_tensors_do(form: str) -> None:
    wanted = Problem(model(), nn.CrossEntropyLoss(), X, Y)
    problem = Problem(model(), nn.CrossEntropyLoss(), *ARRAYS[form])
    assert torch.equal(problem.targets, Y)
    assert problem.targets.dtype == torch.int64
    assert torch.equal(trained(problem), trained(wanted))
    chosen = [5, 0, 2]
    some = trained(Problem(model(), nn.CrossEntropyLoss(), X[chosen], Y[chosen]))
    for rows in (chosen, np.array(chosen, np.int32), torch.tensor(chosen)):
        problem = Problem(model(), nn.CrossEntropyLoss(), *ARRAYS[form], rows=rows)
        torch.testing.assert_close(trained(problem), some, rtol=0, atol=1e-6)


def test_an_array_that_must_not_be_written_stays_as_it_is() -> None:
    x = X.numpy().copy()
    x.setflags(write=False)
    problem = Problem(model(), cross_entropy, x, Y)
    problem.inputs.zero_()
    assert np.array_equal(x, X.numpy())


def linear() -> nn.Module:
    return nn.Linear(5, 1)


@pytest.mark.parametrize("loss", [nn.MSELoss(), nn.BCEWithLogitsLoss(), nn.functional.l1_loss])
def test_whole_numbers_that_a_loss_compares_are_numbers(loss: Any) -> None:
    """PyTorch's backward pass refuses them."""
    y = (Y > 0).long()[:, None]
    wanted = trained(Problem(model(linear), loss, X, y.float()))
    for targets in (y.numpy(), y.double().numpy(), y.bool()):
        problem = Problem(model(linear), loss, X, targets)
        assert not problem.classifies
        assert torch.equal(trained(problem), wanted)
        streamed = StreamedProblem(model(linear), loss, [*zip(X, targets, strict=True)])
        torch.testing.assert_close(trained(streamed), wanted, rtol=0, atol=1e-6)


def both(data: Any, make: Callable[[], nn.Module] = Net, **options: Any) -> None:
    """Give ``data`` to both kinds of problem, which must say the same."""
    said = []
    for kind in (Problem, StreamedProblem):
        with pytest.raises(ValueError, match=r"^[^\n]*$") as refused:
            kind(model(make), cross_entropy, data, **options).evaluate()
        said.append(str(refused.value))
    assert said[0] == said[1]
    raise ValueError(said[0])


@pytest.mark.parametrize("name", TARGETS)
def test_the_targets_are_found_where_there_is_one_candidate(name: str) -> None:
    wanted = trained(Problem(model(), cross_entropy, X, Y))
    data = rows_of(**{"img": X, name: Y})
    for kind in (Problem, StreamedProblem):
        assert torch.equal(trained(kind(model(), cross_entropy, data)), wanted)
    other = next(one for one in TARGETS if one != name)
    with pytest.raises(ValueError, match=f"{name!r}.*: name the targets by target=..."):
        both(rows_of(**{"img": X, name: Y, other: Y}))
    unknown = rows_of(img=X, fine=Y)
    with pytest.raises(ValueError, match=r"a batch has \['fine', 'img'\], none of these names: "):
        both(unknown)
    for kind in (Problem, StreamedProblem):
        assert torch.equal(trained(kind(model(), cross_entropy, unknown, target="fine")), wanted)


class Several(Net):
    """Takes two inputs, by name."""

    def forward(self, x: Tensor, scale: Tensor | float = 1.0) -> Tensor:
        return super().forward(x * scale)


def test_several_inputs_go_by_name_or_which_ones_is_asked() -> None:
    two = rows_of(x=X, scale=torch.full((7, 1), 2.0), label=Y)
    wanted = trained(Problem(model(), cross_entropy, 2 * X, Y))
    assert torch.equal(trained(StreamedProblem(model(Several), cross_entropy, two)), wanted)
    with pytest.raises(ValueError, match="holds one tensor of inputs: a StreamedProblem passes"):
        Problem(model(Several), cross_entropy, two)
    other = rows_of(img=X, coarse=Y, fine=Y)
    with pytest.raises(ValueError, match=r"the inputs \['coarse', 'img'\], and Net.forward takes"):
        both(other, target="fine")


class Lines(IterableDataset[Any]):
    def __iter__(self) -> Any:
        yield from rows_of(img=X, label=Y)


def pictures() -> Any:
    from PIL import Image

    return [(Image.new("L", (4, 4)), 0)] * 3


def images(*shape: int) -> Tensor:
    return torch.zeros(7, *shape)


def apart() -> nn.Module:
    return nn.Sequential(nn.Unflatten(1, (5, 1)), nn.Flatten(0, 1), nn.Linear(1, 3))


PAIRS = [(x, (x[0], x[1])) for x in X]
SEVERAL_INPUTS: list[Callable[[], object]] = [
    lambda: Problem(model(), cross_entropy, (X, X), Y),
    lambda: Problem(model(), cross_entropy, [X, X[:, :2]], Y),
    lambda: Problem(model(), cross_entropy, {"a": X, "b": X}, Y),
    lambda: Problem(model(), cross_entropy, ((X, X), Y)),
    lambda: Problem(model(), cross_entropy, TensorDataset(X, X, Y)),
    lambda: Problem(model(), cross_entropy, [((x, x), y) for x, y in zip(X, Y, strict=True)]),
]
TWO_TARGETS: list[Callable[[], object]] = [
    lambda: Problem(model(), cross_entropy, X, (Y, Y)),
    lambda: Problem(model(), cross_entropy, X, [Y.numpy(), Y.numpy()]),
    lambda: Problem(model(), cross_entropy, (X, (Y, Y))),
    lambda: both(PAIRS),
    lambda: both(DataLoader(PAIRS, 3)),
    lambda: both(rows_of(x=X, y=[(a, a) for a in X[:, 0]])),
]

MISTAKES: list[tuple[str, Callable[[], object]]] = [
    ("data must be a Dataset or DataLoader, got ndarray: of arrays make a Problem(model, loss, inp",
     lambda: StreamedProblem(model(), cross_entropy, X.numpy())),
    ("data must be a Dataset or DataLoader, got tuple",
     lambda: StreamedProblem(model(), cross_entropy, (X, Y))),
    ("targets must be given with inputs that are a Tensor",
     lambda: Problem(model(), cross_entropy, X)),
    ("targets must be given with inputs that are a list",
     lambda: Problem(model(), cross_entropy, [X, Y])),
    ("targets must be given with inputs that are a Tensor: an autoencoder has its inputs",
     lambda: Problem(model(), mse_loss, X)),
    ("inputs and targets, got list of one: an autoencoder has its inputs as targets, too",
     lambda: both(TensorDataset(X))),
    *[("a Problem holds one tensor of inputs: a StreamedProblem passes several", mistake)
      for mistake in SEVERAL_INPUTS],
    *[("targets must be one tensor [samples, ...], got 2: make one of them, such as", mistake)
      for mistake in TWO_TARGETS],
    ("data must be a Dataset with a length, a DataLoader, or inputs with targets, got a generator",
     lambda: Problem(model(), cross_entropy, (pair for pair in zip(X, Y, strict=True)))),
    ("data must be one Dataset, got those of ['train', 'test']: choose data['train']",
     lambda: Problem(model(), cross_entropy, {"train": hugging_face(), "test": hugging_face()})),
    ("samples must be tensors, arrays or numbers, found <class 'PIL.Image.Image'>: a transform",
     lambda: both(pictures())),
    ("a batch has no tensor in addition to its targets 'label', but {'img': 'list'}: its samples",
     lambda: both(DataLoader(hugging_face(), 3))),
    ("targets have shape [7, 1], and the model's outputs [7, 3]: classes have shape [7], by",
     lambda: both(TensorDataset(X, Y[:, None]))),
    ("targets have type float32, and classes are integers",
     lambda: both(TensorDataset(X, Y.float()))),
    ("targets are 1 to 3, and the model has 3 outputs, for the classes 0 to 2",
     lambda: both(TensorDataset(X, Y + 1))),
    ("targets have shape [7], and the model's outputs [35, 3]: they must be of as many samples",
     lambda: both(TensorDataset(X, Y), apart)),
    ("the model returns a tuple, which the loss does not take",
     lambda: both(TensorDataset(X[:, None], Y), lambda: nn.LSTM(5, 3, batch_first=True))),
    ("inputs have type uint8, and the module takes floating-point numbers: give it those",
     lambda: both(TensorDataset(images(1, 4, 4).byte(), Y), lambda: nn.Conv2d(1, 3, 3))),
    ("inputs have type int64, and the module takes floating-point numbers",
     lambda: both(TensorDataset(X.long(), Y))),
    ("inputs have shape [7, 4, 4], and lack the dimension of channels: inputs[:, None]",
     lambda: both(TensorDataset(images(4, 4), Y), lambda: nn.Conv2d(1, 3, 3))),
    ("inputs have shape [7, 4, 5, 3], and images [samples, channels, height, width]: ",
     lambda: both(TensorDataset(images(4, 5, 3), Y), lambda: nn.Conv2d(3, 3, 3))),
]  # fmt: skip


@pytest.mark.parametrize(("said", "mistake"), MISTAKES, ids=[said for said, _ in MISTAKES])
def test_a_likely_mistake_is_told_in_one_sentence(said: str, mistake: Callable[[], object]) -> None:
    with pytest.raises(ValueError, match=re.escape(said)) as error:
        mistake()
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("loss", "got", "measures"),
    [
        (nn.CrossEntropyLoss(reduction="none"), r"shape \[7\], as reduction='none' returns", False),
        (
            lambda o, y: cross_entropy(o, y)[None],
            r"shape \[1\], as reduction='none' returns",
            False,
        ),
        (lambda o, y: cross_entropy(o, y).item(), "a float", False),
        (lambda o, y: cross_entropy(o.detach(), y), "one without a gradient", True),
        (lambda o, y: (o.argmax(1) != y).float().mean(), "one without a gradient", True),
    ],
)
def test_what_a_loss_returns_is_one_number_with_a_gradient(
    loss: Any, got: str, measures: bool
) -> None:
    problem = Problem(model(), loss, X, Y)
    said = f"^loss must return one number, a scalar tensor with a gradient, got {got}"
    with pytest.raises(ValueError, match=said):
        trained(problem, batch_size=0)
    if measures:
        assert np.isfinite(problem.evaluate().loss)
    else:
        with pytest.raises(ValueError, match=said):
            problem.evaluate()


def test_a_loss_that_fails_otherwise_says_so_itself() -> None:
    def fails(outputs: Tensor, targets: Tensor) -> Tensor:
        raise RuntimeError("of its own")

    with pytest.raises(RuntimeError, match="of its own"):
        Problem(model(), fails, X, Y).evaluate()


def test_one_pass_over_a_loader_is_the_same_each_time_and_leaves_no_trace() -> None:
    own = torch.Generator().manual_seed(5)
    loaders = [
        DataLoader(TensorDataset(X, Y), 3, shuffle=True),
        DataLoader(TensorDataset(X, Y), 3, shuffle=True, generator=own),
        DataLoader(TensorDataset(X, Y), 2, sampler=torch.utils.data.SubsetRandomSampler([1, 4, 6])),
    ]
    networks = [model(), model()]
    for loader in loaders:
        before, of_its_own = torch.get_rng_state(), own.get_state()
        problems = [Problem(network, cross_entropy, loader) for network in networks]
        assert torch.equal(torch.get_rng_state(), before)
        assert torch.equal(own.get_state(), of_its_own)
        assert torch.equal(problems[0].inputs, problems[1].inputs)
    assert sorted(problems[0].targets.tolist()) == sorted(Y[[1, 4, 6]].tolist())
    lines = Problem(model(), cross_entropy, DataLoader(Lines(), 3))
    assert torch.equal(lines.inputs, X)


@pytest.mark.parametrize("lr", [0.1, 1e30])
@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("where", ["inputs", "targets", "neither"])
@pytest.mark.parametrize("streamed", [False, True])
def test_a_model_that_training_makes_infinite_is_told_from_bad_samples(
    where: str, bad: float, lr: float, streamed: bool
) -> None:
    data = {"inputs": X.clone(), "targets": X[:, :1].clone()}
    if where in data:
        data[where][2, 0] = data[where][5, 0] = bad
    problem: Any = Problem(model(linear), mse_loss, **data)
    if streamed:
        problem = StreamedProblem(model(linear), mse_loss, TensorDataset(*data.values()))
    training = LocalTraining(lr=lr, steps=9)
    client = FedAvgClient(problem, client_id=0, training=training)
    arrays = problem.model.arrays(problem.model.vector)
    if where == "neither" and lr == 0.1:
        assert np.isfinite(client.fit(arrays, {})[0][0]).all()
        return
    told = where in data and not streamed
    why = f"{where} have NaN or infinity in 2 of 7" if told else "training diverged, with lr = "
    with pytest.raises(ValueError, match=f"^the trained model is not finite: {why}"):
        client.fit(arrays, {})


def test_images_that_are_not_finite_are_counted_too() -> None:
    """They lie channels-last."""
    images = torch.ones(4, 3, 5, 5)
    images[1, 2, 0, 0] = math.nan
    module = nn.Sequential(nn.Conv2d(3, 2, 3), nn.Flatten(), nn.Linear(18, 2))
    problem = Problem(FlatModel(module), nn.functional.cross_entropy, images, torch.arange(4) % 2)
    client = FedAvgClient(problem, client_id=0)
    with pytest.raises(ValueError, match="inputs have NaN or infinity in 1 of 4 samples"):
        client.fit(problem.model.arrays(problem.model.vector), {})
