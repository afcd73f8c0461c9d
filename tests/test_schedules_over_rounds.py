"""Schedules in closed form: over the rounds of a run, as functions and as texts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import Message
from problems import grid, quadratics, to_record
from torch.optim import SGD
from torch.optim.lr_scheduler import CosineAnnealingLR, ExponentialLR, LinearLR, LRScheduler

from fl_strategies import FedProx, cosine_decay, exponential_decay, linear_decay
from fl_strategies.core.schedules import at
from fl_strategies.core.settings_text import format_params, parse_params

FIRST, LAST, ROUNDS = 0.4, 0.003, 12

SCHEDULERS: list[tuple[Callable[..., dict[int, float]], Callable[[SGD], LRScheduler]]] = [
    (linear_decay, lambda of: LinearLR(of, 1.0, LAST / FIRST, total_iters=ROUNDS - 1)),
    (cosine_decay, lambda of: CosineAnnealingLR(of, ROUNDS - 1, eta_min=LAST)),
    (exponential_decay, lambda of: ExponentialLR(of, (LAST / FIRST) ** (1 / (ROUNDS - 1)))),
]


@pytest.mark.parametrize(("decay", "scheduler"), SCHEDULERS)
def test_a_schedule_over_rounds_is_pytorchs_over_epochs(decay: Any, scheduler: Any) -> None:
    optimizer = SGD([torch.zeros(1, requires_grad=True)], lr=FIRST)
    rates, schedule = [], scheduler(optimizer)
    for _ in range(ROUNDS):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        schedule.step()
    over_rounds = decay(FIRST, LAST, ROUNDS)
    assert [at(over_rounds, t + 1) for t in range(ROUNDS)] == pytest.approx(rates, rel=1e-12)
    assert (over_rounds[1], at(over_rounds, ROUNDS + 7)) == (FIRST, LAST)  # to the bit
    assert decay(FIRST, LAST, 1) == {1: FIRST}
    text = f"mu={decay.__name__}({FIRST}, {LAST}, {ROUNDS})"
    assert parse_params(text) == {"mu": over_rounds}
    assert parse_params(format_params({"mu": over_rounds})) == {"mu": over_rounds}


def test_requests_carry_the_numbers_of_their_round() -> None:
    """Of a hyperparameter and of a local setting."""
    told = []

    def heard(request: Message, reply: Message) -> Message:
        if request.metadata.message_type == "train":
            (config,) = request.content.config_records.values()
            told.append((config["proximal-mu"], config["lr"]))
        return reply

    strategy = FedProx(
        mu=cosine_decay(0.5, 0.1, 3), local={"lr": exponential_decay(0.2, 0.05, 3)},
        fraction_evaluate=0.0, quiet=True,
    )  # fmt: skip
    strategy.start(grid(quadratics(1), fault=heard), to_record(np.zeros(5)), num_rounds=4)
    expected = [(0.5, 0.2), (0.3, 0.1), (0.1, 0.05), (0.1, 0.05)]
    assert told == [pytest.approx(numbers, rel=1e-12) for numbers in expected]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("cosine_decay(1.0, 0.1)", "rho: cosine_decay(1.0, 0.1): .* 'rounds'"),
        ("cosine_decay(1.0, b, 9)", "rho: cosine_decay(1.0, b, 9): malformed"),
        ("linear_decay(1.0, 0.1, 0)", "rounds must be an integer >= 1, got 0"),
        ("exponential_decay(1.0, 0.0, 9)", "to must be > 0, got 0.0"),
        ("linear_decay(1.0, 'a', 9)", "to must be a finite number, got 'a'"),
    ],
)
def test_a_schedule_that_is_none_is_named(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message.replace("(", r"\(").replace(")", r"\)")):
        parse_params(f"rho={text}")
