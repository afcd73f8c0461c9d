"""What a client may cost a GPU beside its arithmetic: launches, and waits of the host.

Counted on an emulated GPU (``emulated_gpu``), where results are the CPU's to the bit.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from conftest import SAMPLE
from emulated_gpu import EmulatedGPU
from flwr.app import Array, ArrayRecord
from laws import TABLE, Row, local
from stacked_runs import classified, clients_of, smooth, stacked
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from clients import Border, FedAvgClient, Problem
from clients.stacking.fit import fit_all


class Counts(NamedTuple):
    launches: int
    to_host: int
    to_device: int
    reads: int


def layers(count: int) -> nn.Module:
    """Return a model of as many linear layers, on [n, 6]."""
    torch.manual_seed(0)
    hidden = [part for _ in range(count - 1) for part in (nn.Linear(6, 6), nn.Tanh())]
    return nn.Sequential(*hidden, nn.Linear(6, 3))


def convolutions() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Unflatten(1, (1, 2, 3)), nn.Conv2d(1, 4, 2), nn.ReLU(), nn.Flatten(), nn.Linear(8, 3)
    )


def samples(count: int) -> tuple[Tensor, Tensor]:
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(count, 6)).astype(np.float32), rng.integers(3, size=count)
    return torch.from_numpy(x), torch.from_numpy(y)


def message(
    module: nn.Module, steps: int, *, clients: int = 1, stack: Any = "off", each: int = 40
) -> Counts:
    """Count a message about FedAvg's clients, whose steps are within one epoch."""
    with EmulatedGPU() as gpu:
        model = Border(module.to("cuda"))
        x, y = (tensor.to("cuda") for tensor in samples(clients * each))
        rows = torch.split(torch.arange(clients * each), each)
        members = [
            FedAvgClient(Problem(model, cross_entropy, x, y, rows=mine), client_id=i)
            for i, mine in enumerate(rows)
        ]
        arrays = model.arrays(model.vector)
        configs = [{"server-round": 1, "seed": 1, "steps": steps, "batch-size": 4}] * clients
        for _ in range(2):  # the first warms up
            before = Counts(gpu.launches, gpu.to_host, gpu.to_device, gpu.reads)
            outcomes = fit_all(members, arrays, configs, stack=stack)
            assert not any(isinstance(outcome, Exception) for outcome in outcomes)
        after = Counts(gpu.launches, gpu.to_host, gpu.to_device, gpu.reads)
    return Counts(*(b - a for a, b in zip(before, after, strict=True)))


@functools.cache
def of_two_layers(clients: int, steps: int, stack: Any = 99) -> Counts:
    return message(layers(2), steps, clients=clients, stack=stack)


def plain_loop(module: nn.Module, steps: int) -> int:
    """Return the launches of as many steps of SGD, as one writes them without any framework."""
    with EmulatedGPU() as gpu:
        module = module.to("cuda")
        x, y = (tensor.to("cuda") for tensor in samples(4 * steps))
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1, foreach=True)
        before = gpu.launches
        for inputs, targets in zip(torch.split(x, 4), torch.split(y, 4), strict=True):
            optimizer.zero_grad()
            cross_entropy(module(inputs), targets).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
        return gpu.launches - before


@pytest.mark.parametrize("build", [lambda: layers(1), lambda: layers(3), convolutions])
def test_a_step_of_fedavg_has_two_launches_more_than_a_plain_loops_at_most(build: Any) -> None:
    ours = message(build(), 9).launches - message(build(), 3).launches
    plain = plain_loop(build(), 9) - plain_loop(build(), 3)
    assert ours <= plain + 6 * 2


def test_a_message_is_one_copy_of_the_model_each_way_whatever_the_number_of_arrays() -> None:
    (few, many), (stack_of_few, stack_of_many) = (
        [message(layers(count), 3, clients=clients, stack=stack) for count in (1, 7)]
        for clients, stack in ((1, "off"), (5, 9))
    )
    assert few[1:] == many[1:]
    assert (few.to_host, few.to_device) == (1, 2)  # the model, and an epoch's order
    assert stack_of_few[1:] == stack_of_many[1:]


def test_a_stacks_launches_and_waits_depend_on_no_number_of_clients() -> None:
    counts = {
        (clients, steps): of_two_layers(clients, steps)
        for clients, steps in itertools.product((2, 5, 20), (3, 9))
    }
    assert counts[2, 3] == counts[5, 3] == counts[20, 3]
    assert counts[2, 9] == counts[5, 9] == counts[20, 9]
    assert counts[2, 9][1:] == counts[2, 3][1:]  # no wait in a step
    assert counts[2, 9].launches > counts[2, 3].launches


def test_a_stacks_step_launches_as_much_as_three_steps_of_one_client() -> None:
    """So that it pays from four clients on, where launches are what a step costs."""
    stack = [of_two_layers(5, steps).launches for steps in (3, 9)]
    alone = [of_two_layers(1, steps, "off").launches for steps in (3, 9)]
    assert stack[1] - stack[0] <= 3 * (alone[1] - alone[0])


@pytest.mark.sampled("fedadmm")
@pytest.mark.parametrize(
    ("row", "solver"),
    [
        *((row, "sgd") for row in TABLE if row.name in SAMPLE | {"ditto"}),
        *((row, "delta-sgd") for row in TABLE if row.name == "fedadmm"),
    ],
    ids=str,
)
def test_a_stack_on_a_gpu_is_the_stack_on_the_cpu(row: Row, solver: str) -> None:
    options = {"local": local(solver=solver, **{"batch-size": 5})}
    expected = trained(row, classified(smooth(torch.float32)), options)
    with EmulatedGPU():
        found = trained(row, on_gpu(classified(smooth(torch.float32))), options)
    for mine, theirs in zip(found, expected, strict=True):
        np.testing.assert_array_equal(mine, theirs)


def on_gpu(problems: Sequence[Problem]) -> list[Problem]:
    """Return the same problems on a model on the GPU."""
    model = Border(smooth(torch.float32).to("cuda"))
    held = problems[0].tensors
    x, y = held.inputs.to("cuda"), held.targets.to("cuda")
    return [Problem(model, cross_entropy, x, y, rows=problem.tensors.rows) for problem in problems]


def trained(row: Row, problems: Sequence[Problem], options: dict[str, Any]) -> list[np.ndarray]:
    """Return the model after two rounds of clients that are trained at once."""
    model = problems[0].model
    rng = np.random.default_rng(1)
    start = {
        name: Array(rng.normal(0.0, 0.5, shape).astype(np.float32))
        for name, shape in model.layout.shapes.items()
    }
    federation = stacked(clients_of(problems), len(problems))
    strategy = row.strategy(seed=3, **model.layout_options, **options)
    return strategy.start(federation, ArrayRecord(start), 2).arrays.to_numpy_ndarrays()
