"""Layouts: tied weights, frozen ones and buffers are the same on both sides, or refused."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import Array, ArrayRecord, Context, Message
from laws import START, Row, local, one_of_each_mechanism
from problems import CLIENT_OF, Linear, half_mean_square, quadratics
from torch import Tensor, nn

from clients import AnyAlgorithmClient, Border, ContextStore, Problem, client_app, client_id
from clients.node.in_process import InProcessGrid
from fl_strategies import STRATEGIES, FedAvg, NothingUsable
from fl_strategies.core.layout import Layout


class Frozen(Linear):
    """``Linear`` whose tail is not trained."""

    def __init__(self) -> None:
        super().__init__()
        self.tail.requires_grad_(False)


class Tied(Linear):
    """``Linear`` whose head has a second name and place: x . (head, tail) + x . (head, 0)."""

    def __init__(self) -> None:
        super().__init__()
        self.again = self.head

    def forward(self, x: Tensor) -> Tensor:
        weights = torch.cat([(self.head + self.again).reshape(-1), self.tail])
        summed: Tensor = self.out(x * weights)
        return summed


class Doubled(Linear):
    """What ``Tied`` computes, with one name for each parameter."""

    def forward(self, x: Tensor) -> Tensor:
        summed: Tensor = self.out(x * torch.cat([2 * self.head.reshape(-1), self.tail]))
        return summed


def federation_of(module: type[nn.Module], clients: int = 3) -> tuple[InProcessGrid, Border]:
    problems = quadratics(clients)

    def client_fn(context: Context) -> AnyAlgorithmClient:
        me = client_id(context)
        q, model = problems[me], Border(module(), head="out")
        problem = Problem(model, half_mean_square, torch.tensor(q.X), torch.tensor(q.y))
        return AnyAlgorithmClient(problem, client_id=me, store=ContextStore(context))

    return InProcessGrid(client_app(client_fn), clients), Border(module(), head="out")


def record_of(model: Border) -> ArrayRecord:
    with torch.no_grad():
        model.write(torch.tensor(START)[: len(model.vector)])
    return ArrayRecord({n: Array(t.numpy()) for n, t in model.module.state_dict().items()})


@one_of_each_mechanism
def test_a_tied_weight_is_one_parameter_under_however_many_names_it_travels(row: Row) -> None:
    found = []
    for module in (Tied, Doubled):
        federation, model = federation_of(module)
        settings = local(lr=0.02)
        strategy = row.strategy(local=settings, clipping_norm=None)
        found.append(strategy.start(federation, record_of(model), 3).arrays)
    tied, doubled = found
    np.testing.assert_array_equal(tied["again"].numpy(), tied["head"].numpy())
    assert list(tied) == ["head", "tail", "again"]
    for name in doubled:
        np.testing.assert_allclose(tied[name].numpy(), doubled[name].numpy(), rtol=1e-12)


@pytest.mark.parametrize("name", ["fedavg", "fedadmm", "scaffold"])
def test_a_bound_on_the_norm_counts_a_tied_weight_once(name: str) -> None:
    found = []
    for module in (Tied, Doubled):
        federation, model = federation_of(module)
        strategy = STRATEGIES[name](clipping_norm=0.8, fraction_evaluate=0.0, local=local(lr=0.02))
        result = strategy.start(federation, record_of(model), 2)
        found.append((result.arrays["head"].numpy(), dict(result.train_metrics_clientapp[1])))
    np.testing.assert_allclose(found[0][0], found[1][0], rtol=1e-12)
    assert found[0][1]["clients-used"] == found[1][1]["clients-used"]


@one_of_each_mechanism
@pytest.mark.parametrize("module", [Frozen, Tied])
def test_a_layout_that_nobody_declares_is_learned_to_the_bit(
    row: Row, module: type[nn.Module]
) -> None:
    """A frozen array stays on the server as it is."""
    federation, model = federation_of(module)
    begun, settings = record_of(model), local(lr=0.02)
    found = row.strategy(local=settings).start(federation, begun, 2).arrays
    declared = row.strategy(local=settings, **model.layout_options)
    expected = declared.start(federation_of(module)[0], begun, 2).arrays
    assert list(found) == list(expected) == list(begun)
    for name, array in expected.items():
        np.testing.assert_array_equal(found[name].numpy(), array.numpy())
        assert (found[name].numpy() == begun[name].numpy()).all() == (name in model.layout.frozen)


@pytest.mark.parametrize(
    ("module", "wrong", "reason"),
    [
        (Frozen, {"frozen": {}, "buffers": (), "ties": ()}, r"does not send \['tail'\]"),
        (Tied, {"ties": ()}, r"the tied parameters \[\('head', 'again'\)\], and this run \[\]"),
        (Linear, {"buffers": ["tail"]}, r"it trains \['tail'\], which are buffers in this run"),
    ],
)
def test_options_come_first_and_clients_with_another_model_are_refused_by_name(
    module: type[nn.Module], wrong: dict[str, Any], reason: str
) -> None:
    federation, model = federation_of(module)
    strategy = FedAvg(fraction_evaluate=0.0, local=local(), **wrong)
    with pytest.raises(NothingUsable, match=f"3 clients.*{reason}"):
        strategy.start(federation, record_of(model), 4)


def test_digests_that_are_not_the_initial_models_are_refused() -> None:
    federation, model = federation_of(Frozen)
    strategy = FedAvg(frozen={"tail": "12345678"}, fraction_evaluate=0.0, local=local())
    with pytest.raises(ValueError, match=r"frozen: \['tail'\] of the initial model have other"):
        strategy.start(federation, record_of(model), 1)


def test_copies_of_a_tied_weight_that_differ_are_refused_on_both_sides() -> None:
    federation, model = federation_of(Tied)

    def torn(request: Message, reply: Message) -> Message:
        if CLIENT_OF[request.metadata.dst_node_id] == 1 and reply.content.array_records:
            reply.content.array_records["arrays"]["again"] = Array(np.ones((2, 2)))
        return reply

    federation.fault = torn
    options = {"fraction_evaluate": 0.0, "local": local(), **model.layout_options}
    metrics = FedAvg(**options).start(federation, record_of(model), 1).train_metrics_clientapp[1]
    assert (metrics["clients-used"], metrics["clients-rejected"]) == (2, 1)
    initial = record_of(model)
    initial["again"] = Array(np.ones((2, 2)))
    with pytest.raises(ValueError, match="arrays 'head' and 'again' of the initial model differ"):
        FedAvg(**options).start(federation, initial, 1)
    with pytest.raises(ValueError, match="'head' and 'again' are one tied parameter"):
        model.load([array.numpy() for array in initial.values()])


@pytest.mark.parametrize(
    ("ties", "said"),
    [
        ([["head", "body"]], r"ties: \['body'\] are not among the model's arrays"),
        ([["head", "state"]], r"ties: \['state'\] are among `buffers`"),
        ([["head"]], "each group needs two names or more"),
        ([["head", "again"], ["again", "head"]], "each name once"),
        ([["head", "tail"]], "arrays 'head' and 'tail' of the initial model differ"),
    ],
)
def test_what_is_no_tie_is_refused(ties: list[list[str]], said: str) -> None:
    arrays = {name: np.ones(2) for name in ("head", "again", "state")} | {"tail": np.zeros(2)}
    with pytest.raises(ValueError, match=said):
        Layout.of(arrays, ["state"], ties)
