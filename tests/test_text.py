"""Laws of text: tokens of a tokenizer, the LSTM, the DistilBERT classifier; all without network.

Mutants that these tests caught: texts not cut, padded to the longest, the first piece repeated, the
second half forgotten, halves exchanged, another default length; bounds of the small types doubled,
the least length one less, half a token; other errors awaited for a missing package, tokenizer or
source. The LSTM's first output or mean, one layer, batch and time exchanged, a shape that is no
text; padding attended to, or nothing else; two classes always, weights always or never the
source's, bounds off by one, those of length and vocabulary exchanged; integers not made int64, or
made floats; vocabulary or options not passed on.
"""

from __future__ import annotations

import copy
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from tiny_data import WORDS, ag_news, dbpedia, distilbert, sentences, tokenizer
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from clients import Border, LocalTraining, Problem, solve
from fl_strategies.core.randomness import stream
from fl_strategies.core.subproblem import Subproblem
from simulations import data, text
from simulations.models import build

CLS, SEP, UNKNOWN = (WORDS.index(word) for word in ("[CLS]", "[SEP]", "[UNK]"))


@pytest.fixture(scope="module")
def words(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tokenizer(tmp_path_factory.mktemp("tokenizer")))


@pytest.fixture(scope="module")
def bert(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(distilbert(tmp_path_factory.mktemp("distilbert")))


@pytest.fixture(scope="module")
def news(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(ag_news(tmp_path_factory.mktemp("news") / "own"))


def tokens(*halves: str, length: int) -> list[int]:
    """Return markers and words of a text, or of two, padded."""
    found = [CLS]
    for half in halves:
        found += [WORDS.index(w) if w in WORDS else UNKNOWN for w in half.split()] + [SEP]
    return found + [0] * (length - len(found))


def test_the_tokens_of_a_text_are_its_words_between_markers(words: str, news: str) -> None:
    found = data.load(news, tokenizer=words, tokens=12)
    expected = [tokens(sentence, length=12) for sentence in sentences(30)]
    assert np.concatenate([found.x, found.test_x]).tolist() == expected
    assert np.concatenate([found.y, found.test_y]).tolist() == [0, 3, 1] * 10
    assert (found.x.dtype, found.num_classes, found.vocabulary) == (np.uint8, 4, len(WORDS))
    assert found.owner is None


def test_a_title_and_its_content_are_two_halves(words: str, tmp_path: Path) -> None:
    found = data.load(str(dbpedia(tmp_path / "own")), tokenizer=words, tokens=12)
    contents = sentences(30)[::-1]
    expected = [tokens(f"word{'abc'[i % 3]}", contents[i], length=12) for i in range(30)]
    assert np.concatenate([found.x, found.test_x]).tolist() == expected
    assert found.num_classes == 14


def test_long_texts_are_cut_to_the_length_and_keep_both_markers(words: str, news: str) -> None:
    found = data.load(news, tokenizer=words, tokens=8)
    long = [i for i in range(20) if i % 7 == 6]  # seven words
    assert found.x.shape == (20, 8)
    for i in long:
        assert found.x[i].tolist() == [*tokens(sentences(30)[i], length=0)[:7], SEP]
    whole = data.load(news, tokenizer=words)
    assert whole.x.shape == (20, 128)


def test_texts_are_tokenised_alike_in_one_piece_and_in_many(
    words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts = [sentences(25), sentences(26)[1:]]
    whole, _ = text.tokens(texts, words, 16)
    monkeypatch.setattr(text, "CHUNK", 7)
    pieces, _ = text.tokens(texts, words, 16)
    assert np.array_equal(whole, pieces)


@pytest.mark.parametrize(
    ("count", "kind"),
    [(256, np.uint8), (257, np.int16), (32_768, np.int16), (32_769, np.int32)],
)
def test_tokens_are_kept_in_the_smallest_type_that_holds_them(count: int, kind: type) -> None:
    assert text.smallest_type(count) is kind
    assert np.iinfo(kind).max >= count - 1


def test_without_transformers_the_extra_is_named(
    words: str, bert: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    news = str(ag_news(tmp_path / "own"))  # which nothing has read before
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ValueError, match=r"extra 'text' .*pip install transformers"):
        data.load(news, tokenizer=words)
    with pytest.raises(ValueError, match=r"extra 'text' .*pip install transformers"):
        build("distilbert", (12,), 4, seed=1, vocabulary=16, source=bert)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tokenizer": "no/such"}, "tokenizer 'no/such' is neither a folder with one nor found"),
        ({"tokens": 7}, "tokens must be an integer >= 8, got 7"),
        ({"tokenizer": 3}, "tokenizer must be a text, got 3"),
        ({"tokens": True}, "tokens must be an integer >= 8, got True"),
        ({"tokens": 9.5}, "tokens must be an integer >= 8, got 9.5"),
        ({"owners": 2}, r"no option 'owners'.*; it has \['label', 'tokenizer', 'tokens'\]$"),
    ],
)
def test_bad_options_of_text_are_refused(
    options: dict[str, Any], message: str, words: str, news: str
) -> None:
    with pytest.raises(ValueError, match=message):
        data.load(news, **{"tokenizer": words} | options)


# ---- models -----------------------------------------------------------------------------------


def train(problem: Problem, steps: int) -> Tensor:
    training = LocalTraining(solver="gd", lr=0.3, steps=steps)
    start = problem.model.vector.clone()
    return solve(problem, start, Subproblem(), training, stream(1, "t"))[0]


def trained_twin(module: nn.Module, x: Tensor, y: Tensor, steps: int) -> list[Tensor]:
    """Return the state of an untouched copy after plain gradient steps."""
    twin = copy.deepcopy(module).train()
    optimizer = torch.optim.SGD(twin.parameters(), lr=0.3)
    for _ in range(steps):
        optimizer.zero_grad()
        cross_entropy(twin(x), y).backward()
        optimizer.step()
    return list(twin.state_dict().values())


def assert_trains_like_its_twin(module: nn.Module, x: Tensor, y: Tensor) -> None:
    module = module.double()
    before = [value.clone() for value in module.state_dict().values()]
    expected = trained_twin(module, x, y, 3)
    model = Border(module)
    got = model.arrays(train(Problem(model, cross_entropy, x.to(torch.uint8), y), 3))
    for ours, theirs, start in zip(got, expected, before, strict=True):
        np.testing.assert_allclose(ours, theirs.numpy(), rtol=1e-9, atol=1e-12)
        assert not np.array_equal(ours, start.numpy())


def lstm_twin(model: nn.Module, x: Tensor) -> Tensor:
    """Return the last logits by the equations of the cell, one step at a time."""
    weights = {name.removeprefix("1."): value for name, value in model.state_dict().items()}
    inputs = weights["0.weight"][x].unbind(1)
    for layer in ("l0", "l1"):
        w, u = weights[f"weight_ih_{layer}"], weights[f"weight_hh_{layer}"]
        b = weights[f"bias_ih_{layer}"] + weights[f"bias_hh_{layer}"]
        h = c = torch.zeros((len(x), 256))
        outputs = []
        for step in inputs:
            i, f, g, o = (step @ w.T + h @ u.T + b).chunk(4, dim=1)
            c = f.sigmoid() * c + i.sigmoid() * g.tanh()
            h = o.sigmoid() * c.tanh()
            outputs.append(h)
        inputs = tuple(outputs)
    return inputs[-1] @ weights["3.weight"].T + weights["3.bias"]


def test_the_lstm_is_two_layers_of_cells_and_its_last_output() -> None:
    model = build("lstm", (9,), 80, seed=1, vocabulary=80)
    x = torch.randint(0, 80, (4, 9), generator=torch.Generator().manual_seed(2))
    torch.testing.assert_close(model(x), lstm_twin(model, x), rtol=1e-5, atol=1e-6)


def test_the_lstm_has_as_many_parameters_as_its_parts() -> None:
    cells = sum(4 * 256 * (inputs + 256 + 2) for inputs in (8, 256))
    model = build("lstm", (80,), 80, seed=1, vocabulary=80)
    total = sum(p.numel() for p in model.parameters())
    assert total == 80 * 8 + cells + 256 * 80 + 80 == 819_920


def test_the_lstm_as_one_vector_trains_like_an_untouched_copy() -> None:
    generator = torch.Generator().manual_seed(2)
    x, y = torch.randint(0, 80, (5, 6), generator=generator), torch.arange(5) * 7
    model = build("lstm", (6,), 80, seed=1, vocabulary=80)
    assert_trains_like_its_twin(model, x, y)


def some_tokens(n: int, length: int) -> Tensor:
    rows = [tokens(sentence, length=length) for sentence in sentences(n)]
    return torch.tensor(rows)


def test_distilbert_as_one_vector_trains_like_an_untouched_copy(tmp_path: Path) -> None:
    source = str(distilbert(tmp_path, dropout=0.0))
    model = build("distilbert", (12,), 4, seed=1, vocabulary=16, source=source)
    positions = model.body.distilbert.embeddings.position_embeddings.weight
    assert len(positions) == 32
    assert_trains_like_its_twin(model, some_tokens(6, 12), torch.arange(6) % 4)


def test_padding_of_texts_changes_no_output(bert: str) -> None:
    model = build("distilbert", (12,), 4, seed=1, vocabulary=16, source=bert).eval()
    short, long = model(some_tokens(7, 9)), model(some_tokens(7, 20))
    torch.testing.assert_close(short, long, rtol=1e-5, atol=1e-6)
    alone = torch.cat([model(some_tokens(7, 20)[i : i + 1, : 3 + i % 7]) for i in range(7)])
    torch.testing.assert_close(alone, long, rtol=1e-5, atol=1e-6)
    assert (long - long[0]).abs().max() > 0  # texts matter


def test_pretrained_weights_are_the_sources_and_the_seed_draws_the_classifier(bert: str) -> None:
    first, again, other = (
        build("distilbert", (12,), 4, seed=seed, vocabulary=16, source=bert).state_dict()
        for seed in (1, 1, 2)
    )
    assert first["body.classifier.weight"].shape == (4, 8)
    saved = load_file(Path(bert) / "model.safetensors")
    for name, value in first.items():
        assert torch.equal(value, again[name])
        old = saved.get(name.removeprefix("body.distilbert."))
        assert (old is None) == ("classifier" in name)
        if old is not None:
            assert torch.equal(value, old)
        elif name.endswith("weight"):
            assert not torch.equal(value, other[name])


def test_without_pretraining_the_seed_draws_all_weights_of_the_same_shapes(bert: str) -> None:
    before = torch.get_rng_state()
    given = {"vocabulary": 16, "source": bert}
    first, again, other = (
        build("distilbert", (12,), 4, seed=seed, pretrained=False, **given).state_dict()
        for seed in (1, 1, 2)
    )
    assert torch.equal(torch.get_rng_state(), before)
    trained = build("distilbert", (12,), 4, seed=1, **given).state_dict()
    assert {n: v.shape for n, v in first.items()} == {n: v.shape for n, v in trained.items()}
    for name, value in first.items():
        assert torch.equal(value, again[name])
        if name.endswith("lin1.weight") or "embeddings.weight" in name:
            assert not torch.equal(value, other[name])
            assert not torch.equal(value, trained[name])


def test_distilbert_has_a_loss_for_every_class_and_dropout(bert: str) -> None:
    model = build("distilbert", (12,), 14, seed=1, vocabulary=16, source=bert)
    x = some_tokens(6, 12)
    with torch.random.fork_rng(devices=[]):
        assert model(x).shape == (6, 14)
        assert not torch.equal(model.train()(x), model(x))
    assert torch.equal(model.eval()(x), model(x))


@pytest.mark.parametrize(
    ("shape", "vocabulary", "options", "message"),
    [
        ((33,), 16, {}, "the data have 33 tokens a text, the model knows 32"),
        ((12,), 17, {}, "the data have 17 different tokens, the model knows 16"),
        (
            (12,),
            16,
            {"source": "no/such"},
            r"model 'distilbert' from 'no/such' \(option source\): ",
        ),
        ((3, 4), 16, {}, r"shape must be \(length,\) of a text, got \(3, 4\)"),
    ],
)
def test_a_distilbert_that_does_not_fit_is_refused(
    shape: tuple[int, ...], vocabulary: int, options: dict[str, Any], message: str, bert: str
) -> None:
    with pytest.raises(ValueError, match=message):
        build("distilbert", shape, 4, seed=1, vocabulary=vocabulary, **{"source": bert} | options)
