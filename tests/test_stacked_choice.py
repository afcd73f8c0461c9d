"""How many clients are trained at once: by the committed table, the memory, and their work."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
from laws import local
from stacked_runs import (
    ROWS,
    assert_alike,
    classified,
    clients_of,
    smooth,
    start,
)
from stacked_runs import nothing_was_said as nothing_was_said

from clients import (
    Border,
    FedAvgClient,
    Problem,
    client_app,
)
from clients.learning.memory import client_bytes
from clients.stacking import choice, fit
from clients.stacking.fit import fit_all

# ---- how many at once ---------------------------------------------------------------------------


@pytest.mark.parametrize(("most", "memory"), [(2, 1 << 28), (1000, 11_000)])
def test_several_stacks_make_what_one_makes(most: int, memory: int) -> None:
    settings = local(solver="sgd", **{"batch-size": 5})
    problems = classified(smooth(), sizes=(7, 12, 3, 16))
    steps = mock.patch("clients.stacking.fit.stacked_steps", wraps=fit.stacked_steps)
    with mock.patch.object(fit, "MEMORY", {"cpu": memory}), steps as stacks:
        assert_alike(ROWS["fedadmm"], problems, local=settings, stack=most)
    assert {len(call.args[0]) for call in stacks.call_args_list} == {2}


def test_the_memory_that_is_stated_bounds_the_vectors_of_a_stack() -> None:
    problems = classified(smooth(), sizes=(4,) * 40)
    vector = problems[0].model.vector
    each = sum(client_bytes(problems[0], 4))
    assert each >= 12 * vector.numel() * vector.element_size()
    seen: list[int] = []

    def noted(members: Any, *_: Any) -> dict[int, Any]:
        seen.append(len(members))
        return {member.place: None for member in members}

    with mock.patch("clients.stacking.fit._stacked", noted):
        clients = [FedAvgClient(p, client_id=i) for i, p in enumerate(problems)]
        fit_all(clients, start(problems), [{}] * 40, stack=1000, memory=13 * each)
    assert seen == [13, 13, 13, 1]


def test_problems_of_one_module_are_trained_in_one_stack() -> None:
    """Each has a border of its own."""
    problems = classified(smooth(), sizes=(7,) * 4)
    module, loss = problems[0].model.module, problems[0].loss
    own = [Problem(module, loss, p.tensors.inputs, p.tensors.targets) for p in problems]
    clients = [FedAvgClient(problem, client_id=i) for i, problem in enumerate(own)]
    with mock.patch("clients.stacking.fit.stacked_steps", wraps=fit.stacked_steps) as stacks:
        fit_all(clients, start(problems), [{}] * 4, stack=9)
    assert [len(call.args[0]) for call in stacks.call_args_list] == [4]


def rows(*gains: tuple[str, str, int, int, float]) -> list[dict[str, Any]]:
    names = ("device", "kind", "d", "clients", "gain")
    return [dict(zip(names, row, strict=True)) for row in gains]


def test_auto_stacks_where_the_table_has_a_gain_for_as_large_a_model_and_as_few_clients() -> None:
    table = rows(
        ("cpu", "dense", 100, 10, 4.0), ("cpu", "dense", 100, 50, 6.0),
        ("cpu", "dense", 900, 10, 0.9), ("cpu", "dense", 900, 50, 1.2),
        ("cpu", "conv", 900, 50, 9.0),
    )  # fmt: skip
    model = Border(smooth())  # 43 parameters
    with mock.patch.object(choice, "table", return_value=table):
        assert choice.measured_gain("cpu", "dense", 43, 49) == 4.0
        assert choice.measured_gain("cpu", "dense", 101, 49) == 0.9
        assert choice.measured_gain("cpu", "dense", 101, 70) == 1.2
        for device, d, clients in (("cpu", 43, 9), ("cpu", 901, 99), ("cuda", 43, 99)):
            assert choice.measured_gain(device, "dense", d, clients) == 0.0
        assert choice.stacked_at("auto", model, [4] * 30) == (0, 30)
        assert choice.stacked_at("auto", model, [4] * 2) == (2, 2)
        assert choice.stacked_at(7, model, [4] * 9) == (0, 7)
        assert choice.stacked_at("off", model, [4] * 30) == (30, 1)
        choice._costs.cache_clear()


def test_auto_trains_those_one_by_one_that_work_much_longer_than_the_rest() -> None:
    """A step of ten or fewer takes 2.5 steps of one, one of fifty takes 8."""
    table = rows(("cpu", "dense", 100, 10, 4.0), ("cpu", "dense", 100, 50, 6.25))
    model = Border(smooth())
    choice._costs.cache_clear()
    with mock.patch.object(choice, "table", return_value=table):
        for steps in ([4] * 60, [4] * 10, [1000, 900] + [4] * 50, [30, 20, 10, 5, 4, 3, 2, 1]):
            found, most = choice.stacked_at("auto", model, steps)
            totals = {alone: cost_of(steps, alone) for alone in range(len(steps) + 1)}
            assert most == len(steps)
            assert totals[found] <= 1.05 * min(totals.values())
        assert choice.stacked_at("auto", model, [1000, 900] + [4] * 50)[0] == 2
    choice._costs.cache_clear()


def test_who_works_much_longer_is_in_no_stack() -> None:
    problems = classified(smooth(), sizes=(640, *(5,) * 12))
    clients = [FedAvgClient(p, client_id=i) for i, p in enumerate(problems)]
    table = mock.patch.object(choice, "table", return_value=rows(("cpu", "dense", 100, 5, 4.0)))
    choice._costs.cache_clear()
    stacks = mock.patch(
        "clients.stacking.fit._stacked", side_effect=lambda some, *_: {m.place: None for m in some}
    )
    with table, stacks as stacked, mock.patch("clients.stacking.fit._alone") as alone:
        fit_all(clients, start(problems), [{}] * 13, stack="auto")
    choice._costs.cache_clear()
    assert [call.args[0].client_id for call in alone.call_args_list] == [0]
    assert [[m.client.client_id for m in call.args[0]] for call in stacked.call_args_list] == [
        [*range(1, 13)]
    ]


def cost_of(steps: list[int], alone: int) -> float:
    """Return what the steps cost, the first clients one by one, step by step."""
    rest = steps[alone:]
    left = [sum(own > step for own in rest) for step in range(max(rest, default=0))]
    return sum(steps[:alone]) + sum(max(2.5, n / 4.0 if n < 50 else n / 6.25) for n in left)


@pytest.mark.parametrize("setting", ["on", 1, 0, -3, 2.5, True, None])
def test_an_unknown_setting_is_refused(setting: Any) -> None:
    with pytest.raises(ValueError, match="stack must be"):
        fit_all([], [], [], stack=setting)
    with pytest.raises(ValueError, match="stack must be"):
        client_app(clients_of([]), hosts=3, stack=setting)


def test_the_committed_table_has_the_readme_settings() -> None:
    """Logistic regression pays from ten clients on; the papers' CNN never does on a CPU."""
    assert choice.measured_gain("cpu", "dense", 610, 100) > 2.0
    assert choice.measured_gain("cpu", "conv", 1_663_370, 100) < choice.GAIN
