"""Every model of the papers learns in two rounds of `compare` on its data set's schema, by name."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tiny_data import ag_news, cifar100, dbpedia, distilbert, femnist, shakespeare, tokenizer

from simulations.defaults import defaults
from simulations.lab.compare import main

DATA = {
    "cifar100": cifar100,
    "femnist": femnist,
    "shakespeare": shakespeare,
    "ag_news": ag_news,
    "dbpedia": dbpedia,
}


@pytest.mark.parametrize(
    ("dataset", "model", "clients", "algorithms"),
    [
        ("cifar100", "", 2, "fedavg"),
        ("cifar100", "resnet50", 2, "fedavg"),
        ("cifar100", "cnn-6-16", 2, "fedavg,fedadmm"),
        ("femnist", "", 3, "fedavg"),
        ("shakespeare", "", 2, "fedavg,fedadmm"),
        ("ag_news", "", 2, "fedavg,fedadmm"),
        ("dbpedia", "", 2, "fedavg,fedadmm"),
    ],
)
@pytest.mark.slow
def test_a_model_of_the_papers_runs_on_its_data_by_name(
    dataset: str,
    model: str,
    clients: int,
    algorithms: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("FL_DATA", str(tmp_path))
    DATA[dataset](tmp_path / dataset)
    line = f"--dataset {dataset} --clients {clients} --algorithms {algorithms} --fraction 1"
    line += f" --rounds 2 --steps 2 --batch-size 8 --lr 0.02 --output {tmp_path / 'out'}"
    if model:
        line += f" --model {model}"
    if dataset in ("ag_news", "dbpedia"):
        words, bert = tokenizer(tmp_path / "words"), distilbert(tmp_path / "bert")
        line += f" --model-params source={bert} --partition iid"
        summaries = main([*line.split(), "--dataset-params", f"tokenizer={words} tokens=12"])
    else:
        summaries = main(line.split())
    assert [summary["finished"] for summary in summaries] == [True] * len(summaries)
    assert len({summary["model_sha256"] for summary in summaries}) == len(summaries)
    for summary in summaries:
        folder = tmp_path / "out" / summary["algorithm"]
        config = json.loads((folder / "config.json").read_text())
        assert config["model"] == (model or defaults("fedavg", dataset)["model"])
        rows = [json.loads(line) for line in (folder / "history.jsonl").read_text().splitlines()]
        first, second = (row["test-loss"] for row in rows)
        assert second < first
        assert all(row["clients-used"] == clients for row in rows)
