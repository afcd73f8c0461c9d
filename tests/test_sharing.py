"""Arrays that do not travel: frozen ones stay at home, local ones are their client's own.

FedBN (all but batch normalisation), FedPer (all but the head) and adapters are patterns of
``Border``, for every algorithm that trains by the local solver.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import SAMPLE
from federations import lose
from flwr.app import ArrayRecord, Context
from laws import OWN_STEPS, START, TABLE, Row, local
from problems import Linear, half_mean_square, quadratics, to_vector
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from clients import (
    AnyAlgorithmClient,
    Border,
    ContextStore,
    DirectoryStore,
    FedAvgClient,
    LocalTraining,
    Problem,
    all_but,
    client_app,
    client_id,
    personalized_models,
)
from clients.learning.sharing import matching
from clients.node.in_process import InProcessGrid
from clients.node.state import Owner
from fl_strategies import FedAvg, NothingUsable


class Net(nn.Module):
    """A layer, batch normalisation and a head; the body may be frozen but for an adapter."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(4, 5)
        self.norm = nn.BatchNorm1d(5)
        self.adapter = nn.Linear(5, 5, bias=False)
        self.head = nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.relu(self.norm(self.body(x)))
        out: Tensor = self.head(h + self.adapter(h))
        return out


def net(seed: int = 0) -> Net:
    torch.manual_seed(seed)
    return Net().double()


def samples(client: int) -> tuple[Tensor, Tensor]:
    rng = np.random.default_rng(client)
    n = 9 + 3 * client
    return torch.tensor(rng.normal(client, 1.0, (n, 4))), torch.tensor(rng.integers(0, 3, n))


def federation(
    patterns: dict[str, Any],
    *,
    clients: int = 3,
    module: Callable[[int], nn.Module] = lambda client: net(),
    store: Callable[[Context], Any] = ContextStore,
    **grid: Any,
) -> InProcessGrid:
    """Return clients with a model each."""

    def client_fn(context: Context) -> AnyAlgorithmClient:
        me = client_id(context)
        problem = Problem(Border(module(me), **patterns), cross_entropy, *samples(me))
        return AnyAlgorithmClient(problem, client_id=me, test=problem, store=store(context))

    return InProcessGrid(client_app(client_fn), clients, **grid)


def of_one_process(
    patterns: dict[str, Any], store: Any = ContextStore, **grid: Any
) -> InProcessGrid:
    """Return three clients whose problems are on one and the same model."""
    model = Border(net(), **patterns)
    problems = [Problem(model, cross_entropy, *samples(i)) for i in range(3)]

    def client_fn(context: Context) -> AnyAlgorithmClient:
        me = client_id(context)
        mine = problems[me]
        return AnyAlgorithmClient(mine, client_id=me, test=mine, store=store(context))

    return InProcessGrid(client_app(client_fn), 3, **grid)


SETTINGS: dict[str, Any] = {"solver": "gd", "lr": 0.2, "epochs": 3, "momentum": 0.5}
SPLITS: dict[str, tuple[Any, set[str]]] = {
    "FedBN": (lambda n: all_but(n, nn.BatchNorm1d), {"norm"}),
    "FedPer": (lambda n: "!head", {"head"}),
    "body alone": (lambda n: ["body", "norm*"], {"adapter", "head"}),
}


@cache
def twin_of(split: str) -> tuple[dict[str, Tensor], list[Net]]:
    """Return `twin`'s after three rounds, the reply of client 1 in round 2 being lost."""
    return twin(SPLITS[split][1], 3, lost=(2, 1))


def twin(own: set[str], rounds: int, lost: tuple[int, int]) -> tuple[dict[str, Tensor], list[Net]]:
    """Return the shared arrays and the clients' models after FedAvg over shared arrays, by torch.

    What client ``lost[1]`` did in round ``lost[0]`` is undone, and not averaged.
    """

    def mine(name: str) -> bool:
        return name.split(".")[0] in own

    theta, models = net().state_dict(), [net() for _ in range(3)]
    for number in range(1, rounds + 1):
        used = []
        for i, model in enumerate(models):
            before = copy.deepcopy(model.state_dict())
            model.load_state_dict({n: v for n, v in theta.items() if not mine(n)}, strict=False)
            x, y = samples(i)
            model.train()
            optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.5)
            for _ in range(3):
                optimizer.zero_grad()
                torch.autograd.backward(cross_entropy(model(x), y))
                optimizer.step()
            if (number, i) == lost:
                model.load_state_dict(before)
            else:
                used.append((len(y), copy.deepcopy(model.state_dict())))
        total = sum(n for n, _ in used)
        theta = {
            name: sum(n / total * state[name] for n, state in used)
            if value.is_floating_point()
            else max(state[name] for _, state in used)
            for name, value in theta.items()
        }
    return {n: v for n, v in theta.items() if not mine(n)}, models


@pytest.mark.parametrize("split", SPLITS)
@pytest.mark.parametrize("where", ["context", "directory"])
def test_what_is_not_shared_is_trained_along_and_stays_with_its_client(
    split: str, where: str, tmp_path: Path
) -> None:
    """Also when a reply is lost: the client then goes back to its own arrays of before."""
    patterns, own = SPLITS[split]
    share = {"share": patterns(net())}

    def store(context: Context) -> Any:
        return DirectoryStore(tmp_path, client_id(context))

    on = of_one_process(share, store if where == "directory" else ContextStore, fault=lose((2, 1)))
    model = Border(net(), **share)
    strategy = FedAvg(fraction_evaluate=0.0, local=SETTINGS, **model.layout_options)
    found = strategy.start(on, ArrayRecord(model.state_dict()), 3).arrays
    expected, models = twin_of(split)
    assert found.keys() == expected.keys() == set(model.names)
    assert {name.split(".")[0] for name in model.kept} == own
    for name, value in expected.items():
        np.testing.assert_allclose(found[name].numpy(), value.numpy(), rtol=1e-9, atol=1e-12)
    client_stores = [
        store(c) if where == "directory" else ContextStore(c) for c in on.contexts.values()
    ]
    for i, (kept, theirs) in enumerate(zip(client_stores, models, strict=True)):
        owner = Owner("fedavg", model.signature, strategy.run.id)
        fields = kept.load(owner, 3)
        for name in model.kept:
            mine, other = fields[f"unshared/{name}"], theirs.state_dict()[name].numpy()
            np.testing.assert_allclose(mine, other, rtol=1e-9, atol=1e-12, err_msg=f"{i} {name}")


def test_fine_tuning_also_steps_the_clients_own_arrays(tmp_path: Path) -> None:
    """As the first step of training does: FedPer's head is personal, and is tuned."""
    module = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3))
    problem = Problem(Border(module, share="!2"), cross_entropy, torch.eye(4), torch.arange(4) % 3)
    model = problem.model
    arrays, first = model.arrays(model.vector.clone()), model.kept_arrays()
    training = LocalTraining(solver="gd", lr=0.7, weight_decay=0.1, fine_tune="train")
    client = FedAvgClient(
        problem, client_id=0, test=problem, store=DirectoryStore(tmp_path, 0), training=training
    )
    request = {"algorithm": "fedavg", "server-round": 1, "seed": 0}
    _, _, found = client.evaluate(arrays, request)
    model.load_kept(first)
    client.fit(arrays, request)
    assert found["tuned-loss"] == pytest.approx(problem.evaluate().loss, rel=1e-6)


def test_a_client_is_measured_with_its_own_arrays() -> None:
    share = {"share": "!head"}
    on, model = of_one_process(share), Border(net(), share="!head")
    seen: list[Any] = []
    strategy = FedAvg(local=SETTINGS, callbacks=[seen.append], **model.layout_options)
    shared = strategy.start(on, ArrayRecord(model.state_dict()), 2).arrays
    _, models = twin({"head"}, 2, lost=(0, 0))
    losses = []
    for i, theirs in enumerate(models):
        state = {name: torch.tensor(array.numpy()) for name, array in shared.items()}
        theirs.load_state_dict(state, strict=False)
        x, y = samples(i)
        with torch.no_grad():
            losses.append(float(cross_entropy(theirs.eval()(x), y)))
        assert seen[-1].clients[i]["eval-loss"] == pytest.approx(losses[-1], rel=1e-9)
    assert len(set(losses)) == 3


def test_arrays_of_its_own_need_a_store_and_a_newcomer_has_those_of_the_module() -> None:
    share = {"share": "!head"}
    model = Border(net(), **share)
    problem = Problem(model, cross_entropy, *samples(0))
    arrays = model.arrays(model.vector)
    bare = AnyAlgorithmClient(problem, client_id=0)
    with pytest.raises(ValueError, match="fedavg keeps arrays that do not travel on its clients"):
        bare.fit(arrays, {"lr": 0.1})
    context = next(iter(of_one_process(share).contexts.values()))
    first = net().state_dict()
    for _ in range(2):  # each begins anew, as it is told that none of its replies was used
        client = AnyAlgorithmClient(problem, client_id=0, store=ContextStore(context))
        client.fit(arrays, {"lr": 1e-30, "acked-round": -1, "server-round": 1})
        for name, value in model.kept_arrays().items():
            np.testing.assert_allclose(value, first[name].numpy(), rtol=1e-12)
        problem.model.load_kept({n: v + 1.0 for n, v in model.kept_arrays().items()})


def test_of_a_module_that_clients_share_each_begins_with_its_first_values() -> None:
    """Whether each request's Border is of one module, or of a new one."""
    one = net()
    heads = []
    for module in (net, lambda: one):

        def client_fn(context: Any, module: Any = module) -> AnyAlgorithmClient:
            problem = Problem(
                Border(module(), share="!head"), cross_entropy, *samples(client_id(context))
            )
            return AnyAlgorithmClient(problem, test=problem)

        on = InProcessGrid(client_app(client_fn), 3)
        FedAvg(local=SETTINGS).start(on, ArrayRecord(net().state_dict()), 2)
        kept = personalized_models(on, Border(net(), share="!head")).values()
        heads.append([{n: a for n, a in of.items() if n.startswith("head")} for of in kept])
    for fresh, shared in zip(*heads, strict=True):
        assert fresh.keys() == shared.keys() != set()
        for name, array in fresh.items():
            np.testing.assert_array_equal(shared[name], array)
    Border(one.requires_grad_(True), share="!head")
    with torch.no_grad():
        one.head.weight.fill_(7.0)  # another experiment
    assert Border(one, share="!head").kept_arrays()["head.weight"].max() == 7.0


# ---- all algorithms -----------------------------------------------------------------------------


class Idle(Linear):
    """``Linear`` with arrays of which the loss knows nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.aside = nn.Linear(3, 2, dtype=torch.float64)


def trained(row: Row, patterns: dict[str, Any], idle: bool = True) -> np.ndarray:
    problems = quadratics(3)
    model = Border(Idle() if idle else Linear(), head="out", **patterns)
    made = [
        Problem(model, half_mean_square, torch.tensor(q.X), torch.tensor(q.y)) for q in problems
    ]
    with torch.no_grad():
        model.write(torch.tensor(START))

    def client_fn(context: Context) -> AnyAlgorithmClient:
        me = client_id(context)
        return AnyAlgorithmClient(made[me], client_id=me, store=ContextStore(context))

    strategy = row.strategy(local=local(), **model.layout_options)
    initial = ArrayRecord(model.state_dict())
    result = strategy.start(InProcessGrid(client_app(client_fn), 3), initial, 3)
    return to_vector(result.arrays)


@cache
def without_idle_arrays(name: str) -> np.ndarray:
    (row,) = (row for row in TABLE if row.name == name)
    return trained(row, {}, idle=False)


@pytest.mark.sampled
@pytest.mark.parametrize(
    "row",
    [row for row in TABLE if row.name in SAMPLE | {"ditto", "fedbc", "moon", "pfedme"}],
    ids=str,
)
@pytest.mark.parametrize(
    "patterns", [{"share": "!aside"}, {"train": "!aside"}], ids=["local", "frozen"]
)
def test_arrays_that_do_not_travel_have_no_part_in_duals_penalties_and_tracking(
    row: Row, patterns: dict[str, Any]
) -> None:
    """Those the loss does not reach change nothing, whatever the algorithm."""
    torch.manual_seed(1)
    if row.name in OWN_STEPS and "share" in patterns:
        with pytest.raises(NothingUsable, match=r"steps of its own.*aside.weight.*share them"):
            trained(row, patterns)
        return
    np.testing.assert_array_equal(trained(row, patterns), without_idle_arrays(row.name))


# ---- frozen arrays ------------------------------------------------------------------------------


def test_adapters_alone_are_trained_and_travel() -> None:
    """As LoRA: the frozen body is the same before and after, and never sent."""
    patterns: dict[str, Any] = {"train": ["*adapter*", "head"], "share": ["adapter", "head"]}
    model = Border(net(), **patterns)
    assert model.names == ["adapter.weight", "head.weight", "head.bias"]
    assert set(model.layout.frozen) == {"body.weight", "body.bias", "norm.weight", "norm.bias"}
    assert all(name.startswith("norm.") for name in model.kept)  # its statistics
    before = {n: v.clone() for n, v in model.module.state_dict().items()}
    on = of_one_process(patterns)
    strategy = FedAvg(fraction_evaluate=0.0, local=SETTINGS, **model.layout_options)
    result = strategy.start(on, ArrayRecord(model.state_dict()), 2)
    assert list(result.arrays) == model.names
    assert result.train_metrics_clientapp[2]["clients-used"] == 3
    sizes = sum(before[name].numel() * 8 for name in model.names)
    sent: Any = result.train_metrics_clientapp[1]["bytes-down"]
    assert sizes < sent / 3 < sizes + 4000
    for name in model.layout.frozen:
        assert torch.equal(model.module.state_dict()[name], before[name])


def test_a_client_with_other_frozen_arrays_is_refused_by_name(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def changed(client: int) -> nn.Module:
        module = net()
        if client == 1:
            with torch.no_grad():
                module.body.weight[2, 1] += 1e-9
        return module

    patterns: dict[str, Any] = {"train": ["adapter", "head"]}
    model = Border(net(), **patterns)
    strategy = FedAvg(fraction_evaluate=0.0, local=SETTINGS, **model.layout_options)
    on = federation(patterns, module=changed)
    result = strategy.start(on, ArrayRecord(model.state_dict()), 1)
    assert result.train_metrics_clientapp[1]["clients-used"] == 2
    assert (
        "client 1 left out: ValueError: the client's frozen arrays ['body.weight'] are not"
        in caplog.text
    )
    options = model.layout_options | {"frozen": {}}
    untold = FedAvg(fraction_evaluate=0.0, local=SETTINGS, **options)
    with pytest.raises(NothingUsable, match=r"it has frozen arrays, and this run has none"):
        untold.start(federation(patterns), ArrayRecord(model.state_dict()), 3)


# ---- patterns -----------------------------------------------------------------------------------

ARRAYS = ["body.0.weight", "body.0.bias", "body.1.weight", "head.weight", "header.bias"]


@pytest.mark.parametrize(
    ("patterns", "places"),
    [
        ("head", [3]),
        ("body", [0, 1, 2]),
        ("body.1", [2]),
        ("*.bias", [1, 4]),
        ("head*", [3, 4]),
        ("!body", [3, 4]),
        (["body", "!*.bias"], [0, 2]),
        (["!body.0", "!head"], [2, 4]),
        (["head.weight", "body.?"], [0, 1, 2, 3]),
    ],
)
def test_a_pattern_is_a_name_a_modules_name_or_has_wildcards(
    patterns: Any, places: list[int]
) -> None:
    assert matching(patterns, ARRAYS, "share") == [ARRAYS[place] for place in places]


@pytest.mark.parametrize(
    ("patterns", "said"),
    [
        ({"share": "heads"}, r"share: 'heads' matches none of the arrays \['body.weight'"),
        ({"train": "norm.running_mean"}, "train: 'norm.running_mean' matches none"),
        ({"share": []}, "share needs a pattern at least"),
        ({"train": "head", "share": "body"}, r"shares no trainable parameter, of \['head.weight'"),
        ({"train": ["head", "!head"]}, "has no trainable parameter"),
    ],
)
def test_patterns_that_leave_nothing_are_refused(patterns: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        Border(net(), **patterns)


def test_all_but_names_what_the_module_has() -> None:
    assert all_but(net(), nn.BatchNorm1d, "head") == ("!norm", "!head")
    with pytest.raises(ValueError, match="the model has no LSTM"):
        all_but(net(), nn.LSTM)


def test_train_sets_which_parameters_ask_for_gradients() -> None:
    module = net()
    Border(module, train="head")
    assert [n for n, p in module.named_parameters() if p.requires_grad] == [
        "head.weight",
        "head.bias",
    ]
    Border(module, train="!head")
    assert "head.weight" not in [n for n, p in module.named_parameters() if p.requires_grad]


def test_names_of_a_tied_parameter_are_shared_together() -> None:
    module = nn.ModuleDict({"first": nn.Linear(3, 3), "second": nn.Linear(3, 3, bias=False)})
    module["second"].weight = module["first"].weight
    model = Border(module, share="second")
    assert model.names == ["first.weight", "second.weight"]
    assert model.kept == ("first.bias",)
    assert model.signature not in (model.layout.signature, None)
    assert model.layout.ties == (("first.weight", "second.weight"),)
