"""Datasets and DataLoaders as a client's loss: augmentation, tokenizers, streams; no network."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import ArrayRecord, Context
from problems import Linear, half_mean_square, oracle_of, quadratics
from tiny_data import distilbert, sentences, tokenizer
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

from clients import (
    AnyAlgorithmClient,
    ContextStore,
    FlatModel,
    LocalTraining,
    NoFixedSamples,
    StreamedProblem,
    client_app,
    client_id,
    solve,
)
from clients.node.in_process import InProcessGrid
from clients.request import generator
from fl_strategies import STRATEGIES, FedAvg, NothingUsable
from fl_strategies.core.randomness import stream
from fl_strategies.core.subproblem import Subproblem

(QUADRATIC,) = quadratics(1)
X, Y = torch.tensor(QUADRATIC.X), torch.tensor(QUADRATIC.y)


def streamed(data: Any, **options: Any) -> StreamedProblem:
    return StreamedProblem(FlatModel(Linear()), half_mean_square, data, **options)


def trained(problem: Any, seed: int = 1, **settings: Any) -> Tensor:
    training = LocalTraining(**{"lr": 0.05, "epochs": 3, "batch_size": 3, **settings})
    start = torch.zeros_like(problem.model.vector)
    return solve(problem, start, Subproblem(), training, stream(seed, "t")).w


class Pairs(Dataset[Any]):
    """Samples as mappings."""

    def __len__(self) -> int:
        return len(X)

    def __getitem__(self, i: int) -> dict[str, Tensor]:
        return {"x": X[i], "labels": Y[i]}


def test_a_dataset_trains_as_its_tensors_do() -> None:
    """Full batches, and mini-batches cut in the same order; the last is of one sample."""
    found, tensors = streamed(TensorDataset(X, Y)), QUADRATIC.problem()
    assert len(found) == len(tensors)
    assert found.classifies is tensors.classifies is False
    for settings in ({"solver": "gd"}, {"batch_size": 0}, {"epochs": 1}, {"steps": 2}):
        np.testing.assert_allclose(
            trained(found, **settings), trained(tensors, **settings), rtol=1e-12
        )
    assert found.evaluate().loss == pytest.approx(tensors.evaluate().loss, rel=1e-12)
    single = streamed(TensorDataset(X.float(), Y))
    for problem in (found, single):  # the model's type
        assert next(problem.batches(stream(1, "t"), 3))[0].dtype == torch.float64


def test_each_client_draws_its_own_numbers_in_each_round_and_the_same_ones_again() -> None:
    def drawn(number: int, client: int) -> float:
        return generator({"server-round": number, "seed": 1}, "work", number, client).random()

    places = [(number, client) for number in (1, 2) for client in (0, 1)]
    numbers = [drawn(*place) for place in places]
    assert len({*numbers}) == len(places)
    assert [drawn(*place) for place in places] == numbers


def test_batches_are_tuples_or_mappings_and_modules_get_them_by_place_or_name() -> None:
    class Named(Linear):
        def forward(self, x: Tensor, scale: Any = 1.0) -> Tensor:
            return super().forward(x) * scale

    model = FlatModel(Named())
    plain = trained(StreamedProblem(model, half_mean_square, TensorDataset(X, Y)))
    by_name = trained(StreamedProblem(model, half_mean_square, Pairs()))
    assert torch.equal(plain, by_name)
    scaled = TensorDataset(X, torch.full((len(X),), 2.0), Y)
    by_place = StreamedProblem(model, half_mean_square, scaled)
    model.vector.fill_(1.0)
    doubled = by_place.evaluate().loss
    assert doubled == pytest.approx(half_mean_square(2 * X.sum(1), Y).item(), rel=1e-12)
    with pytest.raises(ValueError, match=r"a batch has no targets 'y', but \['labels', 'x'\]"):
        StreamedProblem(model, half_mean_square, Pairs(), target="y").evaluate()
    with pytest.raises(ValueError, match="a batch must be a mapping, or a tuple or list of inputs"):
        StreamedProblem(model, half_mean_square, TensorDataset(X)).evaluate()


class Noisy(Dataset[Any]):
    """Samples that change each time, by torch's, NumPy's and Python's generators."""

    def __len__(self) -> int:
        return len(X)

    def __getitem__(self, i: int) -> tuple[Tensor, Tensor]:
        noise = torch.rand(()) + np.random.rand() + random.random()  # noqa: NPY002
        return X[i] * (1 + 0.1 * noise), Y[i]


@pytest.mark.parametrize(
    "data",
    [
        Noisy(),
        DataLoader(Noisy(), batch_size=3, shuffle=True),
        DataLoader(Noisy(), batch_size=3, shuffle=True, generator=torch.Generator()),
        DataLoader(Noisy(), batch_size=3, sampler=torch.utils.data.RandomSampler(Noisy())),
    ],
    ids=["dataset", "loader", "loader with a generator", "loader with a sampler"],
)
def test_augmentation_and_order_derive_from_the_clients_stream_and_leave_no_trace(
    data: Any,
) -> None:
    torch.manual_seed(3)
    random.seed(3)
    np.random.seed(3)  # noqa: NPY002
    before = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].copy()  # noqa: NPY002
    problem = streamed(data)
    first = trained(problem)
    after = torch.get_rng_state(), random.getstate(), np.random.get_state()[1]  # noqa: NPY002
    assert torch.equal(before[0], after[0])
    assert before[1] == after[1]
    np.testing.assert_array_equal(before[2], after[2])
    for seed in (7, 8):  # wherever the generators stand
        torch.manual_seed(seed)
        random.seed(seed)
        np.random.seed(seed)  # noqa: NPY002
        assert torch.equal(trained(problem), first)
    assert not torch.equal(trained(problem, seed=2), first)
    batches = [x for x, _ in problem.batches(stream(1, "t"), 3)]
    again = [x for x, _ in problem.batches(stream(2, "t"), 3)]
    assert not torch.equal(torch.cat(batches).sort(0)[0], torch.cat(again).sort(0)[0])
    assert problem.evaluate() == problem.evaluate()


class Lines(IterableDataset[Any]):
    """Seven samples that come one after the other."""

    def __iter__(self) -> Iterator[Any]:
        yield from zip(X, Y, strict=True)


def test_a_stream_has_the_length_it_is_told_and_its_loader_makes_the_batches() -> None:
    loader = DataLoader(Lines(), batch_size=3)
    with pytest.raises(ValueError, match="samples must be given: a Lines has no length"):
        streamed(loader)
    with pytest.raises(ValueError, match="data of the type Lines need a DataLoader"):
        streamed(Lines(), samples=7)
    problem = streamed(loader, samples=len(X))
    assert len(problem) == len(X)
    w = np.zeros(5)
    for _ in range(3):
        for rows in (slice(0, 3), slice(3, 6), slice(6, 7)):
            x, y = QUADRATIC.X[rows], QUADRATIC.y[rows]
            w = w - 0.05 * x.T @ (x @ w - y) / len(y)
    np.testing.assert_allclose(trained(problem), w, rtol=1e-12)
    training = LocalTraining(epochs=4, batch_size=3)
    assert (problem.planned(training), problem.most_steps(training)) == (3, 12)
    for settings, asked in (({"batch_size": 5}, "5"), ({"solver": "gd"}, "the full batch")):
        with pytest.raises(ValueError, match=rf"local\['batch-size'\] must be 3, got {asked}"):
            trained(problem, **settings)
    empty = streamed(DataLoader(TensorDataset(X[:0], Y[:0]), batch_size=3), samples=2)
    with pytest.raises(ValueError, match="the DataLoader has no samples"):
        empty.evaluate()


def test_what_needs_the_same_samples_twice_is_refused_with_the_reason() -> None:
    problem = streamed(Noisy())
    oracle = oracle_of(problem)
    w = torch.zeros_like(problem.model.vector)
    with pytest.raises(NoFixedSamples, match="for a full gradient: a StreamedProblem has no fixed"):
        oracle.full_gradient(w)
    with pytest.raises(NoFixedSamples, match="no fixed samples, from which some could be drawn"):
        oracle.difference(w, w, samples=2)
    with pytest.raises(NoFixedSamples, match="they are drawn anew each time"):
        trained(problem, residual=0.0)
    assert np.isfinite(oracle.loss(w))
    assert oracle.gradient(w).vector.shape == w.shape


@pytest.mark.parametrize("name", STRATEGIES)
def test_every_algorithm_runs_on_a_stream_or_says_why_not(name: str) -> None:
    model = FlatModel(Linear(), head="out")
    problem = StreamedProblem(model, half_mean_square, Noisy())

    def client_fn(context: Context) -> AnyAlgorithmClient:
        return AnyAlgorithmClient(
            problem, client_id=client_id(context), store=ContextStore(context)
        )

    settings = {"lr": 0.01} | ({} if name == "fedsgd" else {"steps": 3, "batch-size": 3})
    used = settings if STRATEGIES[name].uses_local else {}
    strategy = STRATEGIES[name](fraction_evaluate=0.0, local=used, **model.layout_options)
    initial = ArrayRecord(model.state_dict())
    grid = InProcessGrid(client_app(client_fn), 2)
    if name in ("moon", "fedpd-vr"):
        with pytest.raises(NothingUsable, match="a StreamedProblem has no fixed samples"):
            strategy.start(grid, initial, 3)
        return
    result = strategy.start(grid, initial, 1)
    assert result.train_metrics_clientapp[1]["clients-used"] == 2
    assert all(np.isfinite(array.numpy()).all() for array in result.arrays.values())


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
        model = FlatModel(module)
        problem = StreamedProblem(model, cross_entropy, data)
        torch.manual_seed(state)

        def client_fn(context: Context) -> AnyAlgorithmClient:
            return AnyAlgorithmClient(problem, client_id=client_id(context), test=problem)

        settings = {"lr": 0.1, "epochs": 2, "batch-size": 3}
        strategy = FedAvg(seed=seed, local=settings, **model.layout_options)
        grid = InProcessGrid(client_app(client_fn), 2)
        result = strategy.start(grid, ArrayRecord(model.state_dict()), 2)
        arrays = [array.numpy() for array in result.arrays.values()]
        assert 0.0 <= result.train_metrics_clientapp[2]["train-accuracy"] <= 1.0
        return arrays, dict(result.evaluate_metrics_clientapp[2])

    (first, measured), (same, again), (other, _) = run(1, 5), run(1, 6), run(2, 5)
    for a, b in zip(first, same, strict=True):
        np.testing.assert_array_equal(a, b)
    assert measured["eval-loss"] == again["eval-loss"]
    assert any(not np.array_equal(a, b) for a, b in zip(first, other, strict=True))


@pytest.mark.slow
def test_a_tokenizers_batch_trains_a_transformer_as_by_hand(tmp_path: Path) -> None:
    """Texts of different lengths, padded batch by batch; random weights, adapters of the head."""
    from transformers import AutoTokenizer, DistilBertConfig, DistilBertForSequenceClassification

    words = AutoTokenizer.from_pretrained(str(tokenizer(tmp_path / "words")))
    texts, labels = sentences(10), torch.arange(10) % 2
    folder = distilbert(tmp_path / "bert", dropout=0.0)

    class Texts(Dataset[Any]):
        def __len__(self) -> int:
            return len(texts)

        def __getitem__(self, i: int) -> tuple[str, Tensor]:
            return texts[i], labels[i]

    def collate(items: list[tuple[str, Tensor]]) -> Any:
        batch = words([text for text, _ in items], padding=True, return_tensors="pt")
        batch["labels"] = torch.stack([label for _, label in items])
        return batch

    def module() -> nn.Module:
        config = DistilBertConfig.from_pretrained(str(folder))
        torch.manual_seed(2)
        return DistilBertForSequenceClassification(config).double()

    model = FlatModel(module(), train=["pre_classifier", "classifier"])
    assert model.layout.frozen.keys() >= {"distilbert.embeddings.word_embeddings.weight"}
    problem = StreamedProblem(model, cross_entropy, Texts(), collate=collate)
    assert problem.classifies
    start = model.vector.clone()
    training = LocalTraining(lr=0.3, epochs=2, batch_size=4)
    solved = solve(problem, start, Subproblem(), training, stream(1, "t"))

    twin = module().train()
    head = [p for n, p in twin.named_parameters() if not n.startswith("distilbert")]
    optimizer, rng = torch.optim.SGD(head, lr=0.3), stream(1, "t")
    for _ in range(2):
        order = rng.permutation(10).tolist()
        rng.integers(2**63)  # the seed of what fetching draws
        for first in range(0, 10, 4):
            rows = order[first : first + 4]
            batch = words([texts[i] for i in rows], padding=True, return_tensors="pt")
            optimizer.zero_grad()
            cross_entropy(twin(**batch).logits, labels[rows]).backward()
            optimizer.step()
    for name, array in zip(model.names, model.arrays(solved.w), strict=True):
        np.testing.assert_allclose(array, twin.state_dict()[name].numpy(), rtol=1e-9, atol=1e-12)
    assert not torch.equal(solved.w, start)
    assert 0.0 <= float(solved.accuracy) <= 1.0
