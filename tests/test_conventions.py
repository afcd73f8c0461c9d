"""Laws of models whose strategy is told nothing: clients describe them, or PyTorch's names do."""

from __future__ import annotations

import logging
from typing import Any

import numpy as np
import pytest
import torch
from federations import serve
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from idioms import IDIOMS, Idiom
from torch import nn
from torch.nn.functional import cross_entropy

from clients import AnyAlgorithmClient, Border, ContextStore, Problem, client_app, client_id
from clients.node.in_process import InProcessGrid
from fl_strategies import STRATEGIES, FedAvg, as_legacy
from fl_strategies.core.layout import conventional_buffers

SETTINGS = {"lr": 0.05, "batch-size": 4}
QUIET: dict[str, Any] = {"fraction_evaluate": 0.0, "local": SETTINGS}
NORMALISED = IDIOMS["batch-norm"]
STATISTICS = [f"layers.1.{name}" for name in ("running_mean", "running_var", "num_batches_tracked")]


def module_of(idiom: Idiom) -> nn.Module:
    torch.default_generator.manual_seed(1)  # torch.manual_seed would seed the GPUs as well
    return idiom.make()


def undescribed(request: Message, reply: Message) -> Message | None:
    """No client describes its model."""
    return None if request.metadata.message_type == "query.describe" else reply


def federation(idiom: Idiom, clients: int = 2, **grid: Any) -> InProcessGrid:
    def client_fn(context: Context) -> AnyAlgorithmClient:
        me, model = client_id(context), Border(module_of(idiom))
        problem = Problem(model, cross_entropy, *idiom.samples(9 + me, me))
        return AnyAlgorithmClient(problem, client_id=me, store=ContextStore(context))

    return InProcessGrid(client_app(client_fn), clients, **grid)


@pytest.mark.parametrize(
    ("name", "algorithm"),
    [
        ("quickstart", "fedavg"),
        ("grouped", "fedadmm"),
        ("transposed", "scaffold"),
        ("vision-transformer", "fedadmm"),
        ("batch-norm", "fedadmm"),
        ("batch-norm", "scaffold"),
        ("tied", "fedadmm"),
        ("frozen", "fedadmm"),
    ],
)
def test_a_network_trains_without_a_word_about_its_arrays(name: str, algorithm: str) -> None:
    """To the bit as if everything were declared; what is not trained stays as it was."""
    idiom = IDIOMS[name]
    model = Border(module_of(idiom))
    initial = ArrayRecord(module_of(idiom).state_dict())
    strategy = STRATEGIES[algorithm](**QUIET)
    result = strategy.start(federation(idiom), initial, 2)
    assert {m["clients-used"] for m in result.train_metrics_clientapp.values()} == {2}
    assert strategy.opened_model.layout == model.layout
    changed = [n for n in initial if (result.arrays[n].numpy() != initial[n].numpy()).any()]
    assert changed == model.names
    assert list(result.arrays) == list(initial)
    for begin in (initial, ArrayRecord(model.state_dict()))[: 1 + (name == "frozen")]:
        told = STRATEGIES[algorithm](**QUIET, **model.layout_options)
        expected = told.start(federation(idiom), begin, 2).arrays
        assert list(expected) == list(begin)
        for n, array in expected.items():
            np.testing.assert_array_equal(result.arrays[n].numpy(), array.numpy())


@pytest.mark.slow
def test_torchvisions_resnet_trains_by_fedavg_without_a_word_about_its_arrays() -> None:
    models = pytest.importorskip("torchvision.models")
    # of a smaller image one value is left per channel, which BatchNorm refuses in a batch of one
    idiom = Idiom(lambda: models.resnet18(num_classes=3), (3, 64, 64))
    result = FedAvg(**QUIET).start(federation(idiom), ArrayRecord(module_of(idiom).state_dict()), 1)
    assert result.train_metrics_clientapp[1]["clients-used"] == 2


def test_the_names_and_types_of_pytorchs_buffers_are_known() -> None:
    parts = [nn.BatchNorm1d(2), nn.BatchNorm1d(2, affine=False), nn.InstanceNorm1d(2), nn.ReLU()]
    for part in (*parts, nn.SyncBatchNorm(2), nn.InstanceNorm2d(2, track_running_stats=True)):
        module = nn.ModuleDict({"part": part})
        module.register_buffer("mask", torch.ones(2, dtype=torch.bool))
        arrays = {name: tensor.numpy() for name, tensor in module.state_dict().items()}
        assert conventional_buffers(arrays) == [n for n, _ in module.named_buffers()]


def test_the_log_names_the_buffers_once(caplog: pytest.LogCaptureFixture) -> None:
    initial = ArrayRecord(module_of(NORMALISED).state_dict())
    lines = []
    with caplog.at_level(logging.INFO):
        for fault in (None, undescribed):
            caplog.clear()
            FedAvg(**QUIET).start(federation(NORMALISED, fault=fault), initial, 2)
            lines += [record.message for record in caplog.records if "buffers" in record.message]
    assert lines == [
        f"by descriptions of 2 clients [0, 1]: buffers {STATISTICS}",
        f"buffers, which no client trains, by PyTorch's names: {STATISTICS}",
    ]


@pytest.mark.parametrize("buffers", [[], STATISTICS[:2]], ids=["none", "some"])
def test_buffers_that_are_given_are_all_of_them(buffers: list[str]) -> None:
    initial = ArrayRecord(module_of(NORMALISED).state_dict())
    with pytest.raises(ValueError, match=r"'layers\.1\.num_batches_tracked' has type int64"):
        FedAvg(buffers=buffers, **QUIET).start(federation(NORMALISED), initial, 1)
    given = FedAvg(buffers=STATISTICS, **QUIET).start(federation(NORMALISED), initial, 2)
    found = FedAvg(**QUIET).start(federation(NORMALISED, fault=undescribed), initial, 2)
    for name, array in given.arrays.items():
        np.testing.assert_array_equal(found.arrays[name].numpy(), array.numpy())


def flowers_own(replies: list[RecordDict]) -> ClientApp:
    """Return an app for Flower's FedAvg: its clients send all of ``state_dict``."""
    app = ClientApp()

    @app.train()
    def train(message: Message, context: Context) -> Message:
        net = module_of(NORMALISED)
        net.load_state_dict(message.content["arrays"].to_torch_state_dict())
        me = int(context.node_config["partition-id"])
        x, y = NORMALISED.samples(9 + 3 * me, me)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
        for _ in range(1 + me):
            optimizer.zero_grad()
            cross_entropy(net(x.float()), y).backward()
            optimizer.step()
        metrics = MetricRecord({"num-examples": len(x)})
        content = RecordDict({"arrays": ArrayRecord(net.state_dict()), "metrics": metrics})
        replies.append(content)
        return Message(content, reply_to=message)

    return app


def test_clients_of_flowers_own_that_send_their_whole_state_are_averaged() -> None:
    replies: list[RecordDict] = []
    initial = ArrayRecord(module_of(NORMALISED).state_dict())
    found = FedAvg(fraction_evaluate=0.0).start(InProcessGrid(flowers_own(replies), 2), initial, 1)
    assert len(replies) == 2
    sizes = [reply["metrics"]["num-examples"] for reply in replies]
    for name, array in found.arrays.items():
        sent = [reply["arrays"][name].numpy() for reply in replies]
        if name.endswith("num_batches_tracked"):
            assert array.numpy() == 2
        else:
            expected = np.average(sent, axis=0, weights=sizes)
            np.testing.assert_allclose(array.numpy(), expected, rtol=1e-5, atol=1e-7)


def test_a_legacy_server_knows_the_names_of_an_initial_model() -> None:
    initial = ArrayRecord(module_of(NORMALISED).state_dict())
    usual = FedAvg(**QUIET).start(federation(NORMALISED), initial, 2).arrays
    strategy = FedAvg(min_available_nodes=2, **QUIET)
    found, _ = serve(as_legacy(strategy, initial), federation(NORMALISED), 2)
    expected = np.concatenate([np.ravel(array.numpy()) for array in usual.values()])
    np.testing.assert_array_equal(found, expected)
