"""A client's personalized model can be had, and is the one that the client itself evaluates."""

from __future__ import annotations

import logging
from collections import OrderedDict
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from federations import lose
from flwr.app import ArrayRecord, Context
from laws import RATE, START, TABLE, local, train
from problems import NODES, Linear, forget, grid, quadratics, to_record, to_vector
from safetensors.torch import load_file
from small_runs import small
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import clients.base
from clients import (
    AnyAlgorithmClient,
    Border,
    ContextStore,
    DirectoryStore,
    InProcessGrid,
    PersonalizedModel,
    Problem,
    StateError,
    client_app,
    client_id,
    personalized_model,
    personalized_models,
)
from clients.personalized import PERSONALIZED
from fl_strategies import Checkpoints
from simulations.experiment import run_in_process
from simulations.population import HOW_TO_KEEP, state_folder
from simulations.problems import fresh_model

CLIENTS = 3
ROWS = {row.name: row for row in TABLE}
SHARES: dict[str, Any] = {
    "all": {},
    "FedPer": {"share": "!head"},
    "FedBN": {"share": ("body.*", "head.*")},
}


class Net(nn.Module):
    """A layer, batch normalisation and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.norm, self.head = nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(torch.relu(self.norm(self.body(x))))
        return out


def net() -> Net:
    torch.manual_seed(5)
    return Net()


def flat(share: str) -> Border:
    return Border(net(), **SHARES[share])


def federation(share: str, states: Path | None = None, **options: Any) -> InProcessGrid:
    """Return clients whose states are in ``states``, or in their contexts."""

    def client_fn(context: Context) -> AnyAlgorithmClient:
        me = client_id(context)
        rng = np.random.default_rng(me)
        x = torch.tensor(rng.normal(me, 1.0, (9 + 3 * me, 4)), dtype=torch.float32)
        problem = Problem(flat(share), cross_entropy, x, torch.tensor(rng.integers(0, 3, len(x))))
        store = DirectoryStore(states, me) if states else ContextStore(context)
        return AnyAlgorithmClient(problem, client_id=me, test=problem, store=store)

    return InProcessGrid(client_app(client_fn), CLIENTS, **options)


def trained(algorithm: str, share: str, on: InProcessGrid, rounds: int = 3, **options: Any) -> Any:
    """Return the global model, as a state dict, of a run in which all clients evaluate."""
    model = flat(share)
    one = ROWS[algorithm].strategy(
        local=local(), **model.layout_options, fraction_evaluate=1.0, **options
    )
    return one.start(on, ArrayRecord(model.state_dict()), rounds).arrays.to_torch_state_dict()


@pytest.fixture
def evaluated(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Tensor]]:
    """Fills with the state dict of each model that a client measures."""
    seen: list[dict[str, Tensor]] = []
    plain = clients.base.measured

    def measured(test: Any, rest: Any, w: Tensor, *draws: Any) -> Any:
        found = plain(test, rest, w, *draws)
        module = test.model.module
        seen.append({name: tensor.clone() for name, tensor in module.state_dict().items()})
        return found

    monkeypatch.setattr(clients.base, "measured", measured)
    return seen


def same(one: Any, other: Any) -> None:
    assert one.keys() == other.keys()
    for name, tensor in one.items():
        assert tensor.dtype == other[name].dtype
        assert torch.equal(tensor, other[name]), name


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("algorithm", "share"),
    [
        *((name, "all") for name in sorted(PERSONALIZED)),
        *(("fedadmm", share) for share in SHARES if share != "all"),
    ],
)
def test_it_is_the_model_that_the_client_evaluates_as_its_own_to_the_bit(
    algorithm: str, share: str, evaluated: list[dict[str, Tensor]]
) -> None:
    on = federation(share)
    shared = trained(algorithm, share, on)
    theirs = evaluated[-2 * CLIENTS :][1::2]  # the global model, and then the client's own
    model = flat(share)
    model.module.load_state_dict({**model.module.state_dict(), **shared})
    before = {name: tensor.clone() for name, tensor in model.module.state_dict().items()}
    found = personalized_models(on, model)
    same(model.module.state_dict(), before)
    assert [*found] == [*range(CLIENTS)]
    for (client, mine), own in zip(found.items(), theirs, strict=True):
        same(mine, own)
        assert (mine.client, mine.round, mine.acknowledged) == (client, 3, False)
        context = on.contexts[NODES[client]]
        same(personalized_model(ContextStore(context), model), own)
        assert not net().load_state_dict(mine).missing_keys


@pytest.mark.parametrize("algorithm", sorted(PERSONALIZED))
@pytest.mark.sampled
def test_a_single_clients_personalized_model_goes_to_its_own_minimiser(algorithm: str) -> None:
    (q,), row = quadratics(1), ROWS[algorithm]
    on, model = grid([q]), Border(Linear(), head="out")
    train(row.strategy(local=local(lr=3 * RATE)), on, 120)
    found = to_vector([array.numpy() for array in personalized_models(on, model)[0].values()])
    np.testing.assert_allclose(found, q.b, atol=1e-6)


@pytest.mark.parametrize("algorithm", sorted(PERSONALIZED))
def test_personalized_models_of_unlike_clients_differ(algorithm: str) -> None:
    on, model = grid(quadratics(3)), Border(Linear(), head="out")
    shared = train(ROWS[algorithm].strategy(local=local()), on, 2)
    models = [[*map(Tensor.numpy, one.values())] for one in personalized_models(on, model).values()]
    first, second, third = map(to_vector, models)
    for one, other in ((first, second), (second, third), (third, shared), (first, shared)):
        assert np.abs(one - other).max() > 1e-3


@pytest.mark.parametrize("algorithm", sorted(PERSONALIZED - {"fedamp"}))
@pytest.mark.sampled
def test_what_a_client_keeps_changes_a_later_round(algorithm: str) -> None:
    """FedAMP's clients keep their model to be measured alone: the server has it, too."""

    def after(*forgetful: int) -> list[np.ndarray]:
        on, model = grid(quadratics(3)), Border(Linear(), head="out")
        strategy = ROWS[algorithm].strategy(local=local())
        shared = strategy.start(on, to_record(START), 2).arrays
        for client in forgetful:
            forget(on, client)
        shared = strategy.start(on, shared, 1).arrays
        own = personalized_models(on, model)[0].values()
        return [to_vector(shared), to_vector([*map(Tensor.numpy, own)])]

    assert np.abs(np.subtract(after(), after(0))).max() > 1e-6


def test_arrays_of_the_clients_own_are_personalized_whatever_the_algorithm(
    evaluated: list[dict[str, Tensor]],
) -> None:
    on = federation("FedPer")
    shared = trained("fedavg", "FedPer", on)
    model = flat("FedPer")
    model.module.load_state_dict({**model.module.state_dict(), **shared})
    for mine, own in zip(
        personalized_models(on, model).values(), evaluated[-CLIENTS:], strict=True
    ):
        same(mine, own)


def test_the_plain_module_will_do_and_is_not_changed() -> None:
    on, module = federation("all"), net()
    trained("ditto", "all", on)
    before = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    storage = module.body.weight.data_ptr()
    found = personalized_models(on, module)
    same(module.state_dict(), before)
    assert module.body.weight.data_ptr() == storage
    assert not torch.equal(found[0]["body.weight"], found[1]["body.weight"])


def test_a_file_by_torch_save_is_a_plain_state_dict(tmp_path: Path) -> None:
    model = PersonalizedModel(net().state_dict(), 3, 7, acknowledged=True)
    torch.save(model, tmp_path / "client-3.pt")
    read = torch.load(tmp_path / "client-3.pt", weights_only=True)
    assert type(read) is OrderedDict
    same(read, model)
    net().load_state_dict(read)


@cache
def of_client_1_after_two_rounds() -> PersonalizedModel:
    on = federation("all")
    trained("ditto", "all", on, rounds=2)
    return personalized_models(on, net())[1]


@pytest.mark.parametrize("where", ["directory", "context"])
def test_a_lost_reply_is_in_the_newest_model_and_not_in_the_acknowledged_one(
    where: str, tmp_path: Path
) -> None:
    """Client 1's reply of round 3, the last, is lost: the server knows its model of round 2."""
    states = tmp_path / "states" if where == "directory" else None
    folder = tmp_path / "checkpoints"
    on = federation("all", states, fault=lose((3, 1)))
    trained("ditto", "all", on, checkpoints=Checkpoints(folder), min_replies=2)
    source: Any = states or on
    newest = personalized_models(source, net())
    used = personalized_models(source, net(), checkpoints=folder)
    assert [one.round for one in newest.values()] == [3, 3, 3]
    assert [one.round for one in used.values()] == [3, 2, 3]
    assert all(one.acknowledged for one in used.values())
    assert not torch.equal(newest[1]["head.bias"], used[1]["head.bias"])
    for name in ("body.weight", "head.bias"):
        assert torch.equal(of_client_1_after_two_rounds()[name], used[1][name])


def test_running_statistics_that_travel_are_the_checkpoints(tmp_path: Path) -> None:
    on = federation("all")
    shared = trained("ditto", "all", on, checkpoints=Checkpoints(tmp_path))
    found = personalized_models(on, net(), checkpoints=tmp_path)
    assert torch.equal(found[0]["norm.running_var"], shared["norm.running_var"])


# ---- errors -------------------------------------------------------------------------------------


def test_a_client_without_a_state_is_told_so(tmp_path: Path) -> None:
    with pytest.raises(StateError, match="holds no state: no client has trained"):
        personalized_model(DirectoryStore(tmp_path / "none", 0), net())
    with pytest.raises(StateError, match="holds no client's state"):
        personalized_models(tmp_path / "none", net())
    states, folder = tmp_path / "states", tmp_path / "checkpoints"
    on = federation("all", states, fault=lose((1, 1)))
    trained("ditto", "all", on, 1, checkpoints=Checkpoints(folder), min_replies=2)
    with pytest.raises(StateError, match="states holds no state of client 7"):
        personalized_model(DirectoryStore(states, 7), net())
    with pytest.raises(StateError, match="the server used no reply of client 1"):
        personalized_model(DirectoryStore(states, 1), net(), checkpoints=folder)
    assert [*personalized_models(states, net(), checkpoints=folder)] == [0, 2]
    with pytest.raises(StateError, match="holds no checkpoint"):
        personalized_models(states, net(), checkpoints=tmp_path / "empty")
    with pytest.raises(StateError, match=r"the grid .* need a ContextStore"):
        personalized_models(on, net())


def test_a_foreign_store_is_refused(tmp_path: Path) -> None:
    states, folder = tmp_path / "states", tmp_path / "checkpoints"
    trained("ditto", "all", federation("all", states), 1)
    trained("ditto", "all", federation("all"), 1, checkpoints=Checkpoints(folder))
    with pytest.raises(StateError, match=r"checkpoint is of run .*, and .*states holds states of"):
        personalized_models(states, net(), checkpoints=folder)
    with pytest.raises(StateError, match=r"states holds states of model .*share, train"):
        personalized_models(states, nn.Linear(4, 3))


def test_an_algorithm_without_personalized_models_says_which_have_them(tmp_path: Path) -> None:
    trained("scaffold", "all", federation("all", tmp_path), 1)
    with pytest.raises(ValueError, match=r"scaffold has no personalized model; .*: .*ditto"):
        personalized_models(tmp_path, net())


# ---- a results folder ---------------------------------------------------------------------------


def test_a_runs_states_give_the_models_of_its_clients(tmp_path: Path) -> None:
    states = str(tmp_path / "state")
    config = small(tmp_path, algorithm="fedbc", clients=4, **{"state-dir": states, "fraction": 1.0})
    run_in_process(config, quiet=True)
    folder = state_folder(config)
    assert folder is not None
    found = personalized_models(folder, fresh_model(config))
    assert [*found] == [0, 1, 2, 3]
    for client, model in found.items():
        kept = load_file(folder / str(client) / "3.safetensors")
        assert torch.equal(torch.cat([t.reshape(-1) for t in model.values()]), kept["x"])


@pytest.mark.parametrize(
    ("algorithm", "keeps", "warned"),
    [("fedbc", False, True), ("fedbc", True, False), ("fedavg", False, False)],
)
def test_a_run_that_keeps_no_personalized_models_says_at_its_start_how_to(
    algorithm: str, keeps: bool, warned: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    states = {"state-dir": str(tmp_path / "state")} if keeps else {}
    caplog.set_level(logging.INFO)
    run_in_process(small(tmp_path, algorithm=algorithm, clients=4, rounds=1, **states))
    lines = [record.getMessage() for record in caplog.records if HOW_TO_KEEP in record.getMessage()]
    assert len(lines) == warned
