"""Laws of every part: its declaration, its text, its place in run-configs and comparisons."""

from __future__ import annotations

import functools
import importlib
import json
import re
import sys
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from federations import serve
from flwr.app import ArrayRecord, MetricRecord
from hosted import federation, shared
from laws import START, TABLE, another, local, train
from problems import grid, make_client_app, quadratics, to_record, to_vector
from resumed import interrupted, outcome, run

from clients import Hosted
from clients.node.in_process import InProcessGrid
from fl_strategies import STRATEGIES, Checkpoints, FederatedStrategy, Options, as_legacy
from fl_strategies.parts import (
    L1,
    L2,
    PARTS,
    QSGD,
    STAGES,
    Adagrad,
    Adam,
    Bernoulli,
    BFloat16,
    Box,
    Buffered,
    BySize,
    Clock,
    Daily,
    Deadline,
    Exponential,
    FedExP,
    Gaussian,
    GeometricMedian,
    HighLoss,
    Krum,
    Markov,
    Median,
    Momentum,
    MultiKrum,
    Part,
    PowerOfChoice,
    Probabilities,
    TopK,
    Trace,
    TrimmedMean,
    Uniform,
    Yogi,
    parse_part,
    parts_for,
)  # fmt: skip
from simulations.config import RunConfig
from simulations.lab.compare import main
from simulations.rules import configs_for, parse_rule

every_part = pytest.mark.parametrize("part", PARTS.values(), ids=PARTS)


@every_part
def test_a_parts_file_has_its_equations_and_source(part: type[Part]) -> None:
    module = sys.modules[part.__module__]
    assert "(1)" in (module.__doc__ or "")
    assert "Reference: " in (module.__doc__ or "")
    assert part.about
    assert part.paper


@every_part
def test_a_parts_stage_is_an_option_of_every_strategy_and_a_key(part: type[Part]) -> None:
    assert part.stage in Options.declarations
    assert issubclass(part, STAGES[part.stage])
    assert hasattr(RunConfig, part.stage)
    with pytest.raises(ValueError, match=f"^{part.stage} must be .*parts`.*, got <class"):
        Options.declarations[part.stage].check(part.stage, part)


@every_part
def test_a_parts_text_gives_the_part(part: type[Part]) -> None:
    numbers = {n: d for n, d in part.declarations.items() if d.kind in (int, float)}
    one = part()
    assert str(one) == part.name
    assert parse_part(part.name) == one
    for name, declared in numbers.items():
        if declared.default:
            other = part(**{name: another(name, declared, declared.default)})
            assert parse_part(str(other), part.stage) == other != one
            assert eval(repr(other), {part.__name__: part}) == other


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("adm", r"server-step: no part 'adm' \(did you mean 'adam'\?\); known: \['momentum'"),
        ("adam lr=-1", "server-step adam: lr must be > 0, got -1"),
        ("adam rate=1", "server-step adam: Adam has no argument 'rate'"),
        ("adam lr", "server-step adam: an option is given as name=value, got 'lr'"),
    ],
)
def test_a_text_that_names_no_part_is_refused(text: str, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        RunConfig.parse({"algorithm": "fedavg", "server-step": text})


def test_a_run_config_has_parts_and_refuses_those_that_do_not_fit() -> None:
    config = RunConfig.parse({"algorithm": "fedavg", "server-step": " adam  lr=0.01 tau=0.001 "})
    assert config.server_step == "adam lr=0.01"  # tau is the default
    assert config.rule == "fedavg+adam"
    assert config.strategy().server_step == Adam(lr=0.01)
    keys = {"algorithm": "fedadmm", "params": "eta=fraction", "server-step": "adam"}
    with pytest.raises(ValueError, match="FedADMM with a number for eta"):
        RunConfig.parse(keys)


def test_a_rule_of_a_comparison_is_an_algorithm_with_parts(tmp_path: Path) -> None:
    assert parse_rule("fedavg") == ("fedavg", {})
    given = ["mu=0.3", "adam.lr=0.02", "fedavg+momentum.weights=uniform"]
    rules = ["fedavg", "fedprox", "fedprox+adam", "fedavg+momentum"]
    found = {one.rule: one for one in configs_for(rules, given, {}, tmp_path)}
    assert [*found] == rules
    assert [one.parts.get("server_step") for one in found.values()] == [
        None,
        None,
        Adam(lr=0.02),
        Momentum(),
    ]
    assert found["fedprox+adam"].params == found["fedprox"].params == "mu=0.3"
    assert (found["fedavg"].params, found["fedavg+momentum"].params) == ("", "weights=uniform")
    assert Path(found["fedprox+adam"].output).name == "fedprox+adam"
    for names, params, said in (
        (["fedavg+adm"], [], r"no part 'adm' \(did you mean 'adam'\?\); known"),
        (["fedavg+adam+yogi"], [], "two parts of one stage: adam and yogi"),
        (["fedavg+adam"], ["adam.mu=1"], "no algorithm here has the hyperparameter 'mu'"),
        (["fedavg"], ["adam.lr=1"], "of a part behind its name: --server-step 'adam lr=1'"),
    ):
        with pytest.raises(ValueError, match=said):
            configs_for(names, params, {}, tmp_path)


@pytest.mark.slow
def test_compare_runs_rules_with_parts(tmp_path: Path) -> None:
    line = "--dataset digits --clients 5 --rounds 2 --quiet --algorithms fedavg,fedavg+momentum"
    summaries = main([*line.split(), "--output", str(tmp_path)])
    assert [summary["algorithm"] for summary in summaries] == ["fedavg", "fedavg+momentum"]
    assert summaries[0]["model_sha256"] != summaries[1]["model_sha256"]
    config = json.loads((tmp_path / "fedavg+momentum/config.json").read_text())
    assert (config["algorithm"], config["server_step"]) == ("fedavg", "momentum")
    table: list[dict[str, Any]] = json.loads((tmp_path / "table.json").read_text())
    assert [row["algorithm"] for row in table] == ["fedavg", "fedavg+momentum"]
    assert table[1]["settings"].endswith(", momentum")


# ---- algorithm x part -----------------------------------------------------------------------


def parameters(part: type[Part]) -> dict[str, Any]:
    """Return hyperparameters for a round of three clients."""
    return {"attackers": 0} if "attackers" in part.declarations else {}


def needed_with(stage: str) -> dict[str, Any]:
    """Return what else a part of the stage needs."""
    return {"clock": Clock(step=1.0)} if stage == "pace" else {}


def sized() -> InProcessGrid:
    """Return three clients on one host, which says how many samples they have."""
    app = make_client_app(quadratics(3), hosts=lambda context: Hosted([*range(3)], [7, 9, 11]))
    return InProcessGrid(app, 3, hosts=1)


@every_part
@pytest.mark.sampled("topk", "uniform", "median", "gaussian", "adam")
def test_a_part_runs_a_round_around_every_algorithm_or_says_why_not(part: type[Part]) -> None:
    for row in TABLE:
        uniform = part.stage == "privacy" and "weights" in row.others
        options: dict[str, Any] = {"weights": "uniform"} if uniform else {}
        rule = row.strategy(local=local(epochs=1), **options)
        given = {**needed_with(part.stage), part.stage: part(**parameters(part))}
        if part.refusal(rule, row.name):
            with pytest.raises(ValueError, match=f"^{part.stage}=.* does not go with .*; use "):
                row.strategy(local=local(epochs=1), **given, **options)
            continue
        strategy = row.strategy(local=local(epochs=1), **given, **options)
        found = train(strategy, sized(), 1)
        assert np.isfinite(found).all(), row.name
        assert strategy.result.skipped == [], row.name


TOGETHER: dict[str, dict[str, Any]] = {
    "fedadmm": {
        "eta": "fraction", "selection": Probabilities(p={0: 2.0, 1: 0.5}), "regularizer": L1(),
        "compression": TopK(share=0.4), "clock": Clock(step=1.0, jitter=0.5), "pace": Deadline(),
        "availability": Bernoulli(),
    },
    "fedadmm, asynchronous": {
        "eta": "fraction", "selection": Uniform(), "regularizer": L2(), "download": BFloat16(),
        "clock": Exponential(), "pace": Buffered(size=2, concurrency=4), "availability": Markov(),
    },
    "fedadmm, in a box": {
        "eta": "fraction", "regularizer": Box(), "availability": Daily(), "clock": Clock(step=1.0),
    },
    "scaffold": {
        "selection": HighLoss(), "compression": TopK(share=0.4), "server_step": Momentum(),
    },
    "fednova, rounded": {"compression": QSGD(levels=100), "download": BFloat16()},
    "fedavg": {"compression": BFloat16(), "combine": Median(), "server_step": Adam()},
    "fedavg, trimmed": {"combine": TrimmedMean(), "server_step": Yogi(), "availability": Trace()},
    "fedavg, geometric": {"combine": GeometricMedian(), "server_step": Adagrad()},
    "fedavg, private": {"weights": "uniform", "privacy": Gaussian(seed=5, sampling="fixed")},
    "fedprox": {
        "selection": PowerOfChoice(), "combine": Krum(attackers=0), "compression": TopK(share=0.4),
    },
    "fedprox, several": {"combine": MultiKrum(attackers=0), "server_step": Momentum()},
    "fedprox, extrapolated": {"server_step": FedExP()},
}  # fmt: skip
"""Rules with several parts, by the algorithm and a word."""
OF_SUMS = {"fedadmm, in a box", "fedprox, extrapolated"}
"""Those whose hosts may send means; the others need each upload."""
every_rule = pytest.mark.parametrize("rule", TOGETHER)
ROWS = {row.name: row for row in TABLE}


def with_parts(rule: str, **options: Any) -> FederatedStrategy:
    row = ROWS[rule.partition(",")[0]]
    return row.strategy(local=local(), seed=3, **TOGETHER[rule], **options)


def test_every_part_stands_in_a_rule() -> None:
    """But for BySize, which needs sizes (`test_selection`)."""
    uses = {(stage, part) for stage in STAGES for part in parts_for(stage).values()}
    found = {(stage, type(p)) for of in TOGETHER.values() for stage, p in of.items()} & uses
    assert uses - found == {("selection", BySize)}


@every_rule
def test_a_killed_run_with_parts_resumes_to_the_bit(rule: str, tmp_path: Path) -> None:
    def strategy(folder: Path) -> FederatedStrategy:
        kept = Checkpoints(folder / "checkpoints", every=2)
        return with_parts(rule, fraction_train=0.6, checkpoints=kept)

    whole = run(strategy(tmp_path / "whole"), tmp_path / "whole", 5)
    interrupted(strategy(tmp_path / "cut"), tmp_path / "cut", 3, rounds=5)
    assert outcome(run(strategy(tmp_path / "cut"), tmp_path / "cut", 5)) == outcome(whole)
    again = run(strategy(tmp_path / "cut"), tmp_path / "cut", 5)  # which has no round left
    assert outcome(again) == outcome(whole)


class Found(NamedTuple):
    """What a run comes to: the model before each round and at the end, times, losses."""

    models: list[bytes]
    seconds: list[Any]
    losses: list[float]


def found(rule: str, shape: str) -> Found:
    """Return what three rounds come to where hosts send each upload, not a mean."""
    options: dict[str, Any] = {"fold": "off"} if rule in OF_SUMS else {"fold_memory": 0}
    options |= {"fraction_evaluate": 1.0, "node_wait": 0.01}
    models, note = noted()
    strategy = with_parts(rule, **options, **shared(shape))
    strategy.start(federation(shape), to_record(START), 3, evaluate_fn=note)
    rounds = strategy.result.train_metrics_clientapp.values()
    losses = strategy.result.evaluate_metrics_clientapp.values()
    seconds = [row.get("virtual-seconds") for row in rounds]
    return Found(models, seconds, [round(row["eval-loss"], 9) for row in losses])


def noted() -> tuple[list[bytes], Any]:
    """Return a list, and the ``evaluate_fn`` that adds each model to it."""
    models: list[bytes] = []

    def note(server_round: int, arrays: ArrayRecord) -> MetricRecord:
        models.append(to_vector(arrays).tobytes())
        return MetricRecord({"test-loss": 1.0})

    return models, note


@functools.cache
def on_nodes_of_one(rule: str) -> Found:
    return found(rule, "nodes of one")


@every_rule
def test_hosts_send_each_upload_where_it_is_needed_and_change_nothing(rule: str) -> None:
    """Also where what may be a mean would be one."""
    for shape in ("2 hosts, crossed and reversed", "1 host that shares"):
        assert found(rule, shape) == on_nodes_of_one(rule)
    if rule not in OF_SUMS:
        with pytest.raises(ValueError, match=r"fold must be .* which needs each upload"):
            with_parts(rule, fold="on")


@every_rule
def test_a_legacy_server_has_the_models_of_start_or_refuses_a_part(rule: str) -> None:
    strategy = with_parts(rule, min_available_nodes=6)
    if "download" in TOGETHER[rule]:
        with pytest.raises(ValueError, match=r"needs Strategy\.start|has no legacy form"):
            as_legacy(strategy, to_record(START))
        return
    models, note = noted()
    adapter = as_legacy(strategy, to_record(START), evaluate_fn=note)
    serve(adapter, grid(quadratics(6)), 3)
    assert models == on_nodes_of_one(rule).models


def test_the_sites_table_says_what_strategies_do() -> None:
    lines = imported_directives().combinations()
    heads = [cell.strip() for cell in lines[0].strip("|").split("|")][1:]
    assert ", ".join(heads) == ", ".join(
        p.__name__ if stage == p.stage else f"{p.__name__} ({stage})" for stage, p in columns()
    )
    by_class = {part.__name__: part for part in PARTS.values()}
    for line in lines[2 : lines.index("")]:
        name, *cells = [cell.strip() for cell in line.strip("|").split("|")]
        algorithm, *options = re.findall(r"`([^`]+)`", name)
        given = {n: eval(v) for n, _, v in (option.partition("=") for option in options)}
        training = {"lr": 0.1} if STRATEGIES[algorithm].uses_local else {}
        for head, cell in zip(heads, cells, strict=True):
            called, _, other = head.split(", ")[0].partition(" ")
            part = by_class[called]
            stage = {**needed_with(part.stage), other.strip("()") or part.stage: part()}
            if cell == "works":
                STRATEGIES[algorithm](local=training, **given, **stage)
            else:
                assert re.fullmatch(r"refused \(\d+\)", cell)
                with pytest.raises(ValueError, match="does not go with"):
                    STRATEGIES[algorithm](local=training, **given, **stage)


def columns() -> list[tuple[str, type[Part]]]:
    """Return the stage and the part of each column; those alike stand together."""
    found: dict[Any, list[tuple[str, type[Part]]]] = {}
    for stage in STAGES:
        for part in parts_for(stage).values():
            found.setdefault((stage, part.needs), []).append((stage, part))
    return [column for alike in found.values() for column in alike]


def imported_directives() -> Any:
    sys.path.insert(0, str(Path(__file__).parents[1] / "notebooks"))
    try:
        return importlib.import_module("directives")
    finally:
        sys.path.pop(0)
