"""A client without PyTorch, as the recipe shows it, and what the recipe says of every request."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from federations import drop
from flwr.app import ArrayRecord, Context, Message
from laws import TABLE, Row, local, train
from problems import grid, quadratics
from test_pages import PAGES, imported_directives, run
from torch import Tensor, nn
from torch.nn.functional import mse_loss

from clients import (
    AnyAlgorithmClient,
    Border,
    ContextStore,
    InProcessGrid,
    Problem,
    client_app,
    client_id,
)
from fl_strategies import Checkpoints, FedADMM
from fl_strategies.parts import BFloat16, Clock, Deadline, TopK
from fl_strategies.server.algorithm import KEYS
from fl_strategies.solvers.local import default_training

PAGE = PAGES / "recipes/own-client.md"


@pytest.fixture(scope="module")
def page() -> dict[str, Any]:
    return run(PAGE)


def half(outputs: Tensor, targets: Tensor) -> Tensor:
    return mse_loss(outputs[:, 0], targets) / 2


def test_the_numpy_clients_reach_the_minimizer_of_the_mean(page: dict[str, Any]) -> None:
    samples = [page["samples_of"](client) for client in range(4)]
    optimum = np.linalg.lstsq(*map(np.concatenate, zip(*samples, strict=True)), rcond=None)[0]
    np.testing.assert_allclose(page["result"].arrays["w"].numpy(), optimum, atol=1e-6)


@pytest.mark.parametrize("lost", [0.0, 0.4])
def test_numpy_clients_train_as_those_of_this_package_also_when_replies_are_lost(
    lost: float, page: dict[str, Any]
) -> None:
    def client_fn(context: Context) -> AnyAlgorithmClient:
        me = client_id(context)
        model = Border(nn.Linear(3, 1, bias=False).double())
        problem = Problem(model, half, *map(torch.tensor, page["samples_of"](me)))
        return AnyAlgorithmClient(problem, client_id=me, store=ContextStore(context))

    zeros = ArrayRecord({"weight": torch.zeros(1, 3, dtype=torch.float64)})
    ends = []
    for app, initial in ((page["app"], page["initial"]), (client_app(client_fn), zeros)):
        settings = {"lr": 0.02, "steps": 4, "batch-size": 20}
        strategy = FedADMM(eta="fraction", rho=1.0, fraction_evaluate=0.0, local=settings)
        on = InProcessGrid(app, num_clients=4, fault=drop(lost))
        (array,) = strategy.start(on, initial, num_rounds=12).arrays.values()
        ends.append(array.numpy().ravel())
    np.testing.assert_allclose(*ends, rtol=1e-10)


def keys_sent(row: Row, **options: Any) -> set[str]:
    """Return the keys of two rounds' requests to train."""
    keys: set[str] = set()

    def read(request: Message, reply: Message) -> Message:
        if request.metadata.message_type == "train":
            keys.update(request.content.config_records["config"])
        return reply

    train(
        row.strategy(local=local(), node_wait=0.01, **options), grid(quadratics(2), fault=read), 2
    )
    return keys


def test_the_recipe_says_every_key_of_a_request_and_no_other(tmp_path: Path) -> None:
    table = PAGE.read_text().split("## What a request says")[1].split("##")[0]
    said = re.findall(r"`([a-z-]+)`", " ".join(re.findall(r"^\| (`.*?) \|", table, re.MULTILINE)))
    contract = imported_directives().contract
    seen: set[str] = set()
    for row in TABLE:
        sent = keys_sent(row, **row.hyperparameters) - default_training().settings.keys()
        own = sent - {*said}
        assert own <= {*re.findall(r"`([a-z0-9-]+)`", contract(row.name))}, row.name
        seen |= sent - own
    fedavg, pace = Row("fedavg"), Deadline(seconds=1.0, cut=True)
    seen |= keys_sent(fedavg, checkpoints=Checkpoints(tmp_path), clock=Clock(step=0.1), pace=pace)
    seen |= keys_sent(fedavg, compression=TopK(share=0.5), download=BFloat16())
    seen |= keys_sent(Row("a-fedpd"), fraction_train=0.5)
    assert {*said} - seen <= {"frozen"}  # no array of these models is
    # no hyperparameter may be sent as one of them
    assert {*said} - {"local"} <= KEYS | default_training().settings.keys()
