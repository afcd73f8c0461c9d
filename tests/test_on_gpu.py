"""What only a GPU can show: CUDA's kernels, its generators, and where the host waits for it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from stacked_runs import classified, relative, smooth
from torch import nn

from clients import Border, FedAvgClient, Problem
from clients.stacking.fit import fit_all

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]

ASKED: dict[str, Any] = {"server-round": 1, "seed": 2, "batch-size": 5, "epochs": 3, "lr": 0.05}
CLOSE = 1e-4
"""In float32: other kernels add up in another order."""


def members(module: nn.Module, device: str) -> list[FedAvgClient]:
    """Return clients of ``module``, which is moved to ``device``."""
    model = Border(module.to(device))
    return [
        FedAvgClient(
            Problem(model, p.loss, p.tensors.inputs, p.tensors.targets, rows=p.tensors.rows),
            client_id=number,
        )
        for number, p in enumerate(classified(smooth(torch.float32)))
    ]


def uploads(module: nn.Module, device: str, stack: Any) -> list[list[np.ndarray]]:
    clients = members(module, device)
    start = [array.copy() for array in clients[0].get_parameters({})]
    outcomes = fit_all(clients, start, [ASKED] * len(clients), stack=stack)
    assert not any(isinstance(outcome, Exception) for outcome in outcomes)
    return [outcome[0] for outcome in outcomes]  # type: ignore[index]


@pytest.mark.parametrize("stack", ["off", 9])
def test_a_gpu_makes_the_models_of_the_cpu(stack: Any) -> None:
    expected = uploads(smooth(torch.float32), "cpu", "off")
    found = uploads(smooth(torch.float32), "cuda", stack)
    for mine, theirs in zip(found, expected, strict=True):
        assert relative(mine, theirs) < CLOSE


@pytest.mark.parametrize("stack", ["off", 9])
def test_a_seed_fixes_the_bits_of_a_gpu(stack: Any) -> None:
    first, second = (uploads(smooth(torch.float32), "cuda", stack) for _ in range(2))
    for mine, theirs in zip(first, second, strict=True):
        assert all(map(np.array_equal, mine, theirs))


def test_dropout_on_a_gpu_draws_from_its_own_generator_and_puts_it_back() -> None:
    module = nn.Sequential(nn.Dropout(0.5), smooth(torch.float32))
    torch.cuda.manual_seed(7)
    before = torch.cuda.get_rng_state()
    first = uploads(module, "cuda", "off")
    assert torch.equal(torch.cuda.get_rng_state(), before)
    torch.cuda.manual_seed(8)
    again = nn.Sequential(nn.Dropout(0.5), smooth(torch.float32))
    for mine, theirs in zip(uploads(again, "cuda", "off"), first, strict=True):
        assert all(map(np.array_equal, mine, theirs))


def test_the_host_waits_for_a_gpu_in_no_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside the order of an epoch, which is copied before its steps."""
    clients = members(smooth(torch.float32), "cuda")
    gradient = Problem.gradient

    def watched(self: Problem, *batch: Any) -> Any:
        torch.cuda.set_sync_debug_mode("error")
        try:
            return gradient(self, *batch)
        finally:
            torch.cuda.set_sync_debug_mode("default")

    monkeypatch.setattr(Problem, "gradient", watched)
    for client in clients:
        client.fit(client.get_parameters({}), ASKED)
