"""A model trained in parts: FedRep's head, then its body; FedBABU's body alone.

Mistakes these laws are written against: a fixed part that weight decay, momentum or an old gradient
moves; parameters that stay frozen after a round; a head that is lost or shared; a body that is
trained with the head of before; a loop of one's own whose optimizer steps what is fixed.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from clients import (
    AnyAlgorithmClient,
    Border,
    ClientApp,
    ContextStore,
    FedBABUClient,
    FedRepClient,
    LocalTraining,
    OwnTraining,
    Problem,
    attach,
    client_app,
    client_id,
    personalized_models,
)
from clients.node.in_process import InProcessGrid
from fl_strategies import STRATEGIES, FederatedStrategy

LR, MOMENTUM, DECAY, EPOCHS, HEAD_EPOCHS = 0.2, 0.5, 0.05, 3, 4
LOCAL = {"solver": "gd", "lr": LR, "momentum": MOMENTUM, "weight-decay": DECAY, "epochs": EPOCHS}
PHASES = {"fedrep": (("head", HEAD_EPOCHS), ("body", EPOCHS)), "fedbabu": (("body", EPOCHS),)}
both = pytest.mark.parametrize("name", PHASES)


def net(seed: int = 0) -> nn.ModuleDict:
    torch.manual_seed(seed)
    return Net().double()


class Net(nn.ModuleDict):
    def __init__(self) -> None:
        super().__init__({"body": nn.Linear(4, 5), "head": nn.Linear(5, 3)})

    def forward(self, x: Tensor) -> Any:
        return self["head"](torch.tanh(self["body"](x)))


def samples(client: int) -> tuple[Tensor, Tensor]:
    rng = np.random.default_rng(client)
    n = 9 + 3 * client
    return torch.tensor(rng.normal(client, 1.0, (n, 4))), torch.tensor(rng.integers(0, 3, n))


def border(client: int = 0) -> Border:
    return Border(net(), share="!head")


def descend(module: nn.Module, client: int, epochs: int, *parts: str) -> None:
    """Take full-batch steps of SGD, by an optimizer of all that requires gradients."""
    x, y = samples(client)
    of = {name: p for name, p in module.named_parameters() if not parts or name[:4] in parts}
    optimizer = torch.optim.SGD(of.values(), lr=LR, momentum=MOMENTUM, weight_decay=DECAY)
    for _ in range(epochs):
        module.zero_grad()
        torch.autograd.backward(cross_entropy(module(x), y))
        optimizer.step()


@functools.cache
def twin(name: str, rounds: int) -> tuple[dict[str, Tensor], list[nn.ModuleDict]]:
    """Return the body after FedAvg over bodies, and the clients' models, by PyTorch alone.

    No test changes them.
    """
    models, theta = [net() for _ in range(3)], net()["body"].state_dict()
    for _ in range(rounds):
        for client, model in enumerate(models):
            model["body"].load_state_dict(theta)
            for part, epochs in PHASES[name]:
                descend(model, client, epochs, part)
        sizes = [len(samples(client)[1]) for client in range(3)]
        theta = {
            key: sum(
                n / sum(sizes) * m["body"].state_dict()[key]
                for n, m in zip(sizes, models, strict=True)
            )
            for key in theta
        }
    return theta, models


def our_loop(make: Callable[[int], Border] = border) -> Any:
    def client_fn(context: Context) -> AnyAlgorithmClient:
        me = client_id(context)
        problem = Problem(make(me), cross_entropy, *samples(me))
        return AnyAlgorithmClient(problem, test=problem)

    return client_app(client_fn)


def work(config: Any) -> int:
    """Return how long a loop is to train, on whole batches: it is told epochs or steps."""
    (amount,) = [config[name] for name in ("epochs", "steps") if name in config]
    return int(amount)


def own_loop() -> Any:
    def client_fn(context: Context) -> AnyAlgorithmClient:
        me = client_id(context)

        def train(module: nn.Module, config: Any) -> dict[str, float]:
            descend(module, me, work(config))
            return {"epochs": work(config)}

        return AnyAlgorithmClient(OwnTraining(border(), train, len(samples(me)[1])))

    return client_app(client_fn)


KEPT = net()
"""A module that an app keeps from message to message."""


def attached() -> Any:
    app = ClientApp(model=border)

    @app.train()
    def train(message: Message, context: Context) -> Message:
        me, config = client_id(context), message.content["config"]
        KEPT.load_state_dict(message.content["arrays"].to_torch_state_dict())
        attach(KEPT)
        descend(KEPT, me, work(config))
        content = RecordDict({"arrays": ArrayRecord(KEPT.state_dict())})
        content["metrics"] = MetricRecord({"num-examples": len(samples(me)[1])})
        return Message(content, reply_to=message)

    return app


DOORS = {"our loop": our_loop, "own loop": own_loop, "attached": attached}
AMOUNTS = {"our loop": LOCAL, "own loop": {"epochs": EPOCHS}, "attached": {"steps": EPOCHS}}


def strategy(name: str, **options: Any) -> FederatedStrategy:
    heads = {"head_epochs": HEAD_EPOCHS} if name == "fedrep" else {}
    return STRATEGIES[name](**{"fraction_evaluate": 0.0, "local": LOCAL, **heads, **options})


@both
@pytest.mark.parametrize("door", DOORS)
def test_head_and_body_are_trained_apart_through_every_door(name: str, door: str) -> None:
    on = InProcessGrid(DOORS[door](), 3)
    found = strategy(name, local=AMOUNTS[door]).start(on, ArrayRecord(net().state_dict()), 3)
    theta, models = twin(name, 3)
    arrays = found.arrays.to_torch_state_dict()
    for key, value in theta.items():
        torch.testing.assert_close(arrays[f"body.{key}"], value, rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(arrays["head.weight"], net()["head"].weight.data)  # of the start
    for client, own in personalized_models(on, border()).items():
        head = models[client]["head"].state_dict()
        torch.testing.assert_close(own["head.bias"], head["bias"], rtol=1e-9, atol=1e-12)
        torch.testing.assert_close(own["head.weight"], head["weight"], rtol=1e-9, atol=1e-12)
    rounds = found.train_metrics_clientapp
    assert rounds[3]["steps"] == sum(epochs for _, epochs in PHASES[name])
    assert all(p.requires_grad for p in KEPT.parameters())


def test_what_is_not_trained_in_a_phase_has_no_gradient_in_it() -> None:
    """An optimizer that holds all parameters would step by one that was there."""
    whole = border()
    for parameter in whole.trained:
        parameter.grad = torch.ones_like(parameter)
    body = whole.only("shared")
    with body.fixing():
        assert [(p.grad, p.requires_grad) for p in body.fixed] == [(None, False)] * len(whole.own)
        assert all(p.grad is not None and p.requires_grad for p in body.trained)
    assert all(p.requires_grad for p in whole.trained)


@both
def test_a_round_takes_no_more_steps_than_a_clock_counts(name: str) -> None:
    request = {"algorithm": name, "batch-size": 4, "epochs": 2, "head-epochs": 5}
    client = {"fedrep": FedRepClient, "fedbabu": FedBABUClient}[name]
    problem = Problem(border(), cross_entropy, *samples(0))
    made = client(problem, client_id=0)
    assert made.most_steps(request) == 3 * (2 + 5 * (name == "fedrep"))


def test_a_loop_that_steps_what_is_fixed_is_told_so(caplog: pytest.LogCaptureFixture) -> None:
    def client_fn(context: Context) -> AnyAlgorithmClient:
        def train(module: nn.Module, config: Any) -> None:
            descend(module.requires_grad_(True), 0, 1)

        return AnyAlgorithmClient(OwnTraining(border(), train, 9))

    on = InProcessGrid(client_app(client_fn), 1)
    strategy("fedrep", local={}, node_wait=0.01).start(on, ArrayRecord(net().state_dict()), 1)
    assert "the training loop changed ['body.weight', 'body.bias']" in caplog.text


def test_fedbabu_refuses_a_client_whose_head_begins_with_other_values(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def other(client: int) -> Border:
        return Border(net(seed=int(client == 1)), share="!head")

    on, seen = InProcessGrid(our_loop(other), 3), list[Any]()
    one = strategy("fedbabu", callbacks=[seen.append])
    one.start(on, ArrayRecord(net().state_dict()), 1)
    assert {*seen[0].clients} == {0, 2}
    assert "own arrays ['head.weight', 'head.bias'] begin with other values" in caplog.text
    anything = strategy("fedrep", callbacks=[seen.append])
    anything.start(InProcessGrid(our_loop(other), 3), ArrayRecord(net().state_dict()), 1)
    assert {*seen[1].clients} == {0, 1, 2}


@pytest.mark.parametrize("epochs", [0, 2])
def test_personalization_tunes_head_and_body_and_changes_nothing(epochs: int) -> None:
    seen: list[Any] = []
    settings = {**LOCAL, "momentum": 0.0, "fine-tune": "train", "fine-tune-epochs": epochs}
    local = {**settings, "solver": "sgd", "batch-size": 50}
    on = InProcessGrid(our_loop(), 3)
    one = strategy("fedbabu", local=local, fraction_evaluate=1.0, callbacks=[seen.append])
    found = one.start(on, ArrayRecord(net().state_dict()), 2).arrays.to_torch_state_dict()
    for client in range(3):
        model, (x, y) = copy.deepcopy(net()), samples(client)
        model.load_state_dict(found)
        for _ in range(epochs or 1):
            loss = cross_entropy(model(x), y)
            slopes = torch.autograd.grad(loss, [*model.parameters()])
            with torch.no_grad():
                for parameter, slope in zip(model.parameters(), slopes, strict=True):
                    parameter -= LR * (slope + DECAY * parameter)
        tuned = cross_entropy(model(x), y).item()
        assert seen[-1].clients[client]["tuned-loss"] == pytest.approx(tuned, rel=1e-9)
    for own in personalized_models(on, border()).values():
        torch.testing.assert_close(own["head.bias"], net()["head"].bias.data)


def test_epochs_of_fine_tuning_are_on_training_samples() -> None:
    with pytest.raises(ValueError, match="fine_tune_epochs = 2 needs fine_tune train, got test"):
        LocalTraining(fine_tune="test-batch", fine_tune_epochs=2)


@both
def test_no_parameter_stays_frozen_after_a_client_trained(name: str) -> None:
    problem = Problem(border(), cross_entropy, *samples(0))
    context = next(iter(InProcessGrid(our_loop(), 1).contexts.values()))
    client = AnyAlgorithmClient(problem, client_id=0, store=ContextStore(context))
    arrays = problem.model.arrays(problem.model.vector)
    client.fit(arrays, {"algorithm": name, "head-epochs": 1, "lr": 0.1})
    assert all(p.requires_grad for p in problem.model.module.parameters())
