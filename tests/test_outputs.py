"""What modules return: a record with logits, several outputs, outputs without an accuracy."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from clients import FlatModel, LocalTraining, Problem, StreamedProblem, solve
from fl_strategies.core.randomness import stream
from fl_strategies.core.subproblem import Subproblem


@pytest.mark.parametrize(
    ("outputs", "targets", "accuracy"),
    [
        ([[0.0, 1.0], [3.0, 1.0]], [1, 1], 0.5),
        ([[[0.0, 2.0], [1.0, 1.0]], [[5.0, 2.0], [1.0, 3.0]]], [[1, 0], [1, 1]], 0.75),  # sequences
        ([[2.0], [1.0]], [1, 0], math.nan),  # one logit for two classes
        ([[2.0], [1.0]], [[1], [0]], math.nan),
        ([2.0, 1.0], [1, 0], math.nan),
        ([[2.0, 1.0, 3.0], [1.0, 1.0, 2.0]], [[1, 0, 1], [0, 0, 1]], math.nan),  # several labels
    ],
)
def test_accuracy_is_a_share_of_the_targets_or_there_is_none(
    outputs: Any, targets: Any, accuracy: float
) -> None:
    module = nn.Identity()
    module.unused = nn.Parameter(torch.zeros(1))
    given = torch.tensor(outputs), torch.tensor(targets)
    problem = Problem(FlatModel(module), lambda o, y: o.sum(), *given)
    assert problem.evaluate().accuracy == pytest.approx(accuracy, nan_ok=True)


WORDS = [[[1.0, 0.0], [0.0, 3.0], [4.0, 2.0]], [[0.0, 1.0], [2.0, 0.0], [1.0, 3.0]]]
"""Scores [n, words, classes]: the likeliest classes are 0 1 0 and 1 0 1."""


@pytest.mark.parametrize(
    ("index", "targets", "accuracy"),
    [
        (-100, [[0, 1, -100], [0, -100, -100]], 0.5),
        (-100, [[0, 0, -100], [-100, -100, -100]], 0.5),  # the second sample has no label
        (-100, [[-100, -100, -100], [-100, -100, -100]], math.nan),
        (1, [[0, 1, 1], [1, 1, 0]], 0.5),
        (0, [[0, 1, 0], [1, 1, 1]], (1 + 2 / 3) / 2),
    ],
)
def test_labels_that_the_loss_ignores_do_not_count_in_the_accuracy(
    index: int, targets: Any, accuracy: float
) -> None:
    loss = nn.CrossEntropyLoss(ignore_index=index)
    words, labels = torch.tensor(WORDS).transpose(1, 2), torch.tensor(targets)
    for outputs, y in ((words, labels), (words[0].T, labels[0]), (words[1].T, labels[1])):
        module = nn.Identity()
        module.bias = nn.Parameter(torch.zeros(1))
        module.forward = lambda x, m=module: x + m.bias
        problem = Problem(FlatModel(module), loss, outputs, y)
        gd = LocalTraining(solver="gd")
        found = solve(problem, torch.zeros(1), Subproblem(), gd, stream(1, "solve"))
        counted = y != index
        expected = (outputs.argmax(1) == y)[counted].float().mean()
        expected = float(expected) if y.dim() == 1 else accuracy
        assert float(found.accuracy) == pytest.approx(expected, nan_ok=True)
        assert problem.evaluate().accuracy == pytest.approx(expected, nan_ok=True)


class Tagger(nn.Module):
    """Scores [n, classes, words] of sentences [n, words]."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(9, 3)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.words(x).transpose(1, 2)
        return out


def padded(sentences: list[Tensor]) -> tuple[Tensor, Tensor]:
    pad = nn.utils.rnn.pad_sequence
    labels = [sentence % 3 for sentence in sentences]
    return pad(sentences, batch_first=True), pad(labels, batch_first=True, padding_value=-100)


def test_batches_of_sentences_may_be_padded_to_different_lengths() -> None:
    rng = torch.Generator().manual_seed(3)
    texts = [torch.randint(1, 9, (2 + n % 5,), generator=rng) for n in range(7)]
    problem = StreamedProblem(FlatModel(Tagger()), cross_entropy, texts, collate=padded)
    start, module = problem.model.vector.clone(), problem.model.module
    shares = [float((module(t[None]).argmax(1) == t[None] % 3).float().mean()) for t in texts]
    tiny = LocalTraining(lr=1e-30, batch_size=2)
    found = solve(problem, start, Subproblem(), tiny, stream(1, "solve"))
    assert float(found.accuracy) == pytest.approx(sum(shares) / 7, rel=1e-6)
    assert problem.evaluate().accuracy == pytest.approx(sum(shares) / 7, rel=1e-6)


class Twice(nn.Module):
    """Two outputs in a tuple."""

    def __init__(self) -> None:
        super().__init__()
        self.line = nn.Linear(3, 2)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.line(x), self.line(2 * x)


@pytest.mark.parametrize("autocast", [None, torch.bfloat16])
def test_a_loss_may_be_of_several_outputs_which_have_no_accuracy(
    autocast: torch.dtype | None,
) -> None:
    x, y = torch.ones(5, 3), torch.arange(5) % 2
    problem = Problem(
        FlatModel(Twice()),
        lambda o, y: cross_entropy(o[0].float(), y) + o[1].float().square().mean(),
        x, y, autocast=autocast,
    )  # fmt: skip
    before, gd = problem.evaluate(), LocalTraining(solver="gd")
    found = solve(problem, problem.model.vector.clone(), Subproblem(), gd, stream(1, "solve"))
    assert math.isnan(before.accuracy)
    assert math.isnan(float(found.accuracy))
    problem.model.vector.copy_(found.w)
    assert problem.evaluate().loss < before.loss


class Scaled(nn.Module):
    """Logits in a record, times a parameter that is a number."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.line = nn.Parameter(torch.tensor(2.0)), nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Any:
        return SimpleNamespace(logits=self.scale * self.line(x))


def test_a_parameter_may_be_a_number_and_outputs_a_record_with_logits() -> None:
    x, y = torch.randn(5, 3, generator=torch.Generator().manual_seed(1)), torch.arange(5) % 2
    problem = Problem(FlatModel(Scaled()), cross_entropy, x, y)
    model = problem.model
    loss, outputs = problem.gradient(x, y)
    assert loss == pytest.approx(float(cross_entropy(outputs, y)))
    slopes = torch.autograd.grad(cross_entropy(model.module(x).logits, y), model.shared)
    for ours, theirs in zip(model.views(model.gradient), slopes, strict=True):
        torch.testing.assert_close(ours, theirs)
