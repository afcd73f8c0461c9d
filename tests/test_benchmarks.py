"""What the benchmarks make of the machine's processes, and what they write."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from simulations.lab import benchmark, benchmark_peers, benchmark_stack
from simulations.lab.benchmark_memory import memory_of


def test_memory_is_that_of_the_youngest_process_of_the_name_below_this_one() -> None:

    held = "x = bytearray(60_000_000); print(flush=True); input()"
    sizes = []
    for program in (held.replace("60", "1"), held):
        process = subprocess.Popen(
            [sys.executable, "-c", program, "of-these"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        assert process.stdout is not None
        process.stdout.readline()
        sizes.append(memory_of("of-these"))
        process.communicate(b"\n")
    (_, small), (resident, peak) = sizes
    assert resident - small == pytest.approx(59.0, abs=3.0)
    assert peak >= resident


def test_the_gains_of_stacks_are_written_where_it_is_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    before = benchmark_stack.GAINS.read_text()
    monkeypatch.setattr(benchmark_stack, "gain", lambda *_: 1.5)
    monkeypatch.setattr(benchmark_stack, "GAINS", tmp_path / "gains.json")
    benchmark.main(["stack"])
    assert "| cnn-6-16 | conv | 44,426 | 1.50 |" in capsys.readouterr().out
    assert [*tmp_path.iterdir()] == []
    benchmark.main(["stack", "--write"])
    gains = json.loads((tmp_path / "gains.json").read_text())
    assert {gain["gain"] for gain in gains if gain["device"] == "cpu"} == {1.5}
    assert {*gains[0]} == {"device", "kind", "d", "clients", "gain"}
    assert Path(benchmark_stack.choice.__file__).with_name("gains.json").read_text() == before


@pytest.mark.slow
def test_all_frameworks_train_alike_and_their_table_is_on_the_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = tmp_path / "page.md"
    page.write_text("before\n<!-- peers -->\nold\n<!-- end of peers -->\nafter\n")
    monkeypatch.setattr(benchmark_peers, "PAGE", page)
    monkeypatch.setattr(benchmark_peers, "CASES", {"all": benchmark_peers.Case(4, 4, 60, 3)})
    benchmark_peers.peers(tmp_path, write=True, turns=1)
    lines = [line.split("|") for line in page.read_text().splitlines() if "| all |" in line]
    loss = {words[2].strip(): float(words[-2]) for words in lines if words[-2].strip()}
    echo = loss.pop("an echo client on our engine")
    assert len(loss) == len(benchmark_peers.FRAMEWORKS) - 2  # the echo and pfl-research
    assert max(loss.values()) < echo - 0.1
    assert max(loss.values()) - min(loss.values()) < 0.05
    text = page.read_text()
    assert "| all | pfl-research | left out: no --peers |" in text
    assert text.startswith("before\n<!-- peers -->\n\n`python -m simulations.lab.benchmark ")
    assert text.endswith("<!-- end of peers -->\nafter\n")
    assert "old" not in text
