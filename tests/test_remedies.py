"""What an error says to do helps; it names nothing that would not."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import ArrayRecord
from flwr.common import Context
from torch import nn

from clients import AnyAlgorithmClient, Border, ContextStore, Problem, client_app, client_id
from clients.node.in_process import InProcessGrid
from fl_strategies import FedAvg, FedPDVR, NothingUsable

QUIET: dict[str, Any] = {"fraction_evaluate": 0.0, "quiet": True}


def net(*, frozen: bool) -> nn.Sequential:
    torch.manual_seed(1)
    module = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    module[0].requires_grad_(requires_grad=not frozen)
    return module


@pytest.mark.parametrize("on_server", [True, False])
def test_a_layer_that_some_froze_and_others_did_not_is_named_with_what_to_do(
    on_server: bool,
) -> None:
    def run(*, frozen: bool) -> None:
        def client_fn(context: Context) -> AnyAlgorithmClient:
            loss, targets = nn.functional.cross_entropy, torch.arange(6) % 2
            problem = Problem(Border(net(frozen=frozen)), loss, torch.ones(6, 3), targets)
            return AnyAlgorithmClient(problem, client_id=client_id(context))

        strategy = FedAvg(**QUIET, **Border(net(frozen=on_server)).layout_options)
        initial = ArrayRecord(net(frozen=False).state_dict())
        strategy.start(InProcessGrid(client_app(client_fn), 2), initial, 3)

    told = "do not travel in this run" if on_server else "this client does not share"
    with pytest.raises(NothingUsable, match=told) as caught:
        run(frozen=not on_server)
    assert "['0.weight', '0.bias']" in str(caught.value)
    assert "all clients of a run freeze (requires_grad_(False))" in str(caught.value)
    run(frozen=on_server)  # the remedy


def test_an_algorithm_without_a_learning_rate_is_told_of_none() -> None:
    with pytest.raises(TypeError, match=r"^FedPDVR has no argument 'lr'; its own are"):
        FedPDVR(lr=0.1)

    def client_fn(context: Context) -> AnyAlgorithmClient:
        problem = Problem(Border(nn.Linear(3, 1)), nn.functional.mse_loss, X, X[:, :1])
        return AnyAlgorithmClient(
            problem, client_id=client_id(context), store=ContextStore(context)
        )

    X = torch.from_numpy(np.random.default_rng(0).normal(size=(6, 3))).float()
    strategy = FedPDVR(eta=1e20, gamma=1e20, inner_steps=9, **QUIET)
    initial = ArrayRecord(nn.Linear(3, 1).state_dict())
    with pytest.raises(NothingUsable, match=re.escape("training diverged (")):
        strategy.start(InProcessGrid(client_app(client_fn), 2), initial, 4)
