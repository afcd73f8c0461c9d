"""MOON: its term, its rounds, and what it reduces to."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from dropout_net import MU, TAU, arrays, examples, net, net_problem, nets, same
from flwr.app import Message
from laws import START, quiet, train
from limits import contrast_gradient, contrasted_steps
from problems import (
    CLIENT_OF,
    DIM,
    Linear,
    forget,
    grid,
    make_client_app,
    quadratics,
    to_record,
    to_vector,
)
from torch import Tensor
from torch.nn.functional import cosine_similarity, cross_entropy

from clients import Batch, Border, DirectoryStore, LocalTraining, Problem, client_id, solve
from clients.moon import Contrast, frozen_features
from clients.node.in_process import InProcessGrid
from fl_strategies import MOON, FedAvg, moon
from fl_strategies.core.subproblem import Subproblem
from simulations import models

strategy = partial(quiet, MOON)


# ---- the term -----------------------------------------------------------------------------------


def published(z: Tensor, z_global: Tensor, z_previous: Tensor, tau: float) -> Tensor:
    """(2) as it stands: cross-entropy of the two similarities, the first being the right one."""
    sims = torch.stack([cosine_similarity(z, other) for other in (z_global, z_previous)], 1)
    return cross_entropy(sims / tau, torch.zeros(len(z), dtype=torch.long))


def test_loss_and_gradient_are_those_of_the_published_form() -> None:
    """On three copies of the model, by autograd, with dropout off."""
    live, received, previous = net(1), net(2), net(3)
    problem = net_problem()
    for module in (live, problem.model.module):
        module.drop.p = 0.0
    x, y = problem.tensors.inputs, problem.tensors.targets
    with torch.no_grad():
        z_global, z_previous = (module.eval().seen(x) for module in (received, previous))
    expected = cross_entropy(live(x), y) + MU * published(live.seen(x), z_global, z_previous, TAU)
    expected.backward()

    contrast = Contrast(problem, moon.direction(z_global, z_previous, tau=TAU), mu=MU)
    problem.model.load(arrays(net(1)))
    problem.model.module.train()
    loss, _ = contrast.gradient(contrast.data.whole)
    assert float(loss) == pytest.approx(expected.item(), rel=1e-12)
    for ours, theirs in zip(problem.model.module.parameters(), live.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-9, atol=1e-12)


def test_the_gradient_is_the_slope_of_the_loss() -> None:
    (q,) = quadratics(1)
    problem = q.problem(Border(Linear(), head="out"))
    w, theta, previous = START, START + 1.3, np.array([1.0, 2.0, -3.0, 0.5, 1.5])
    towards = moon.direction(*(torch.tensor(q.X * v) for v in (theta, previous)), tau=TAU)
    contrast = Contrast(problem, towards, mu=MU)

    def value(v: np.ndarray) -> float:
        problem.model.write(torch.tensor(v))
        return contrast.evaluate().loss

    step = 1e-5
    slopes = [(value(w + step * e) - value(w - step * e)) / (2 * step) for e in np.eye(DIM)]
    value(w)
    contrast.full_gradient()
    found = problem.model.gradient.numpy()
    np.testing.assert_allclose(found, slopes, rtol=1e-6)  # step^2 times third derivatives
    exact = q.gradient(w) + MU * contrast_gradient(q, w, theta, previous, TAU)
    np.testing.assert_allclose(found, exact, rtol=1e-11)


@pytest.mark.parametrize(
    ("z_global", "z_previous", "expected"),
    [
        ([3.0, 4.0], [3.0, 4.0], math.log(2)),
        ([-4.0, 3.0], [4.0, -3.0], math.log(2)),  # both at right angles to z
        ([3.0, 4.0], [-4.0, 3.0], math.log(1 + math.exp(-1 / TAU))),
        ([-4.0, 3.0], [3.0, 4.0], math.log(1 + math.exp(1 / TAU))),
        ([3.0, 4.0], [-3.0, -4.0], math.log(1 + math.exp(-2 / TAU))),
        ([0.0, 0.0], [3.0, 4.0], math.log(1 + math.exp(1 / TAU))),  # length 0 is like nothing
    ],
)
def test_the_term_at_known_angles(
    z_global: list[float], z_previous: list[float], expected: float
) -> None:
    z = np.array([[6.0, 8.0]])
    q = moon.direction(np.array([z_global]), np.array([z_previous]), tau=TAU)
    assert math.log1p(math.exp(moon.excess(z, q).item())) == pytest.approx(expected, rel=1e-12)
    assert moon.excess(17.0 * z, q) == pytest.approx(moon.excess(z, q))  # lengths do not matter


def test_features_of_length_zero_have_a_finite_gradient() -> None:
    z = torch.tensor([[0.0, 0.0], [1.0, 2.0]], requires_grad=True)
    s = moon.excess(z, torch.tensor([[5.0, -5.0], [5.0, -5.0]]))
    s.sum().backward()
    assert s[0] == 0.0
    assert torch.isfinite(z.grad).all()


def test_the_rule_runs_on_a_stack_of_clients_and_writes_to_nothing() -> None:
    z, a, b = np.random.default_rng(3).normal(size=(3, 4, 6, 5))
    given = [v.copy() for v in (z, a, b)]
    stacked = moon.excess(z, moon.direction(a, b, tau=TAU))
    for i in range(4):
        alone = [torch.tensor(v[i]) for v in (z, a, b)]
        s = moon.excess(alone[0], moon.direction(*alone[1:], tau=TAU))
        np.testing.assert_allclose(stacked[i], s.numpy(), rtol=1e-12)
    assert same(given, [z, a, b])


@pytest.mark.parametrize("solver", ["gd", "adam", "delta-sgd", "sps", "lbfgs"])
@pytest.mark.sampled("adam")
def test_every_solver_goes_to_where_the_gradient_of_the_whole_vanishes(solver: str) -> None:
    (q,) = quadratics(1)
    problem = q.problem(Border(Linear(), head="out"))
    theta, previous = START, np.array([1.0, 2.0, -3.0, 0.5, 1.5])
    towards = moon.direction(*(torch.tensor(q.X * v) for v in (theta, previous)), tau=TAU)
    contrast = Contrast(problem, towards, mu=MU)
    params = {"sps": "c=1 growth=0 max_step=0.3"}.get(solver, "")
    training = LocalTraining(
        solver=solver, lr=1.0 if solver == "lbfgs" else 0.1, epochs=400, batch_size=0,
        solver_params=params,
    )  # fmt: skip
    info = solve(contrast, torch.tensor(theta), Subproblem(), training, np.random.default_rng(0))
    w = info.w
    left = q.gradient(w.numpy()) + MU * contrast_gradient(q, w.numpy(), theta, previous, TAU)
    assert np.abs(left).max() < 1e-5
    assert np.abs(MU * contrast_gradient(q, w.numpy(), theta, previous, TAU)).max() > 1e-2
    assert info.steps == 400


def test_pieces_of_a_batch_find_their_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    def gradient(micro_batch: int) -> tuple[Tensor, Tensor]:
        problem = net_problem(11)
        problem.model.module.eval()
        q = moon.direction(frozen_features(problem), torch.tensor(np.eye(11, 6)), tau=TAU)
        problem.micro_batch = micro_batch
        contrast = Contrast(problem, q, mu=MU)
        loss, _ = contrast.gradient(contrast.data.whole)
        return loss, problem.model.gradient

    whole = gradient(0)
    monkeypatch.setattr("clients.learning.data.TESTED", 4)
    for ours, theirs in zip(gradient(4), whole, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-11, atol=1e-14)


def test_a_gradient_that_would_stay_unused_is_refused() -> None:
    class Clipped(Problem):
        def gradient(self, batch: Batch) -> tuple[Tensor, Tensor | None]:
            found = super().gradient(batch)
            torch.nn.utils.clip_grad_value_(self.model.trained, 1e-3)
            return found

    with pytest.raises(ValueError, match="got Clipped with a gradient of f of its own"):
        Contrast(
            Clipped(Border(net()), cross_entropy, *examples(7)),
            torch.zeros(7, 6, dtype=torch.float64),
            mu=MU,
        )


def test_accuracy_is_by_labels() -> None:
    problem = net_problem()
    contrast = Contrast(problem, torch.zeros(7, 6, dtype=torch.float64), mu=MU)
    assert contrast.evaluate().accuracy == problem.evaluate().accuracy
    (q,) = quadratics(1)
    of_numbers = Contrast(
        q.problem(Border(Linear(), head="out")), torch.zeros(q.n, DIM, dtype=torch.float64), mu=MU
    )
    assert math.isnan(of_numbers.evaluate().accuracy)


def test_penalty_and_precision_are_those_of_the_problem() -> None:
    """With q = 0 the term is log 2, and the gradient the problem's own to the bit."""
    module = models.build("mlp", (1, 4, 4), 3, seed=0)
    problem = Problem(
        Border(module),
        cross_entropy,
        *examples(7),
        penalty=lambda w: (w * w).sum(),
        autocast=torch.bfloat16,
    )
    loss, _ = problem.gradient(problem.data.whole)
    plain, z = problem.model.gradient.clone(), frozen_features(problem)
    contrast = Contrast(problem, 0.0 * z, mu=MU)
    found, _ = contrast.gradient(contrast.data.whole)
    assert torch.equal(problem.model.gradient, plain)
    assert float(found - loss) == pytest.approx(MU * math.log(2), rel=1e-5)
    assert z.dtype == torch.float32


# ---- rounds -------------------------------------------------------------------------------------


def test_rounds_with_absent_new_reset_and_unheard_clients_are_those_of_the_equations() -> None:
    """The previous model is that of the client's last reply that the server used, or theta."""
    problems, rng = quadratics(6), np.random.default_rng(5)
    events: dict[int, list[tuple[int, bool]]] = {}

    def fault(request: Message, reply: Message) -> Message | None:
        if request.metadata.message_type != "train":
            return reply
        server_round = request.content.config_records["config"]["server-round"]
        lost = bool(rng.random() < 0.3)
        client = CLIENT_OF[request.metadata.dst_node_id]
        events.setdefault(server_round, []).append((client, lost))
        return None if lost else reply

    federation = grid(problems, fault=fault)
    one = strategy(fraction_train=0.6)
    half = train(one, federation, 8)
    forget(federation, 2)
    found = to_vector(one.start(federation, to_record(half), 8).arrays)

    theta, own = START, {}
    for server_round, asked in sorted(events.items()):
        if server_round == 9:
            own.pop(2)
        used = {
            i: contrasted_steps(problems[i], theta, own.get(i, theta))
            for i, lost in asked
            if not lost
        }
        own |= used
        total = sum(problems[i].n for i in used)
        theta = sum((problems[i].n / total * w for i, w in used.items()), np.zeros(DIM))
    np.testing.assert_allclose(found, theta, rtol=1e-9)
    assert any(lost for asked in events.values() for _, lost in asked)
    assert len(events[9]) == 3


def test_with_mu_zero_it_is_fedavg_to_the_bit() -> None:
    """With batches, dropout and BatchNorm: neither masks nor statistics are touched."""
    assert same(nets(MOON, 4, mu=0.0), nets(FedAvg, 4))


def test_a_newcomers_round_is_fedavgs_to_the_bit_and_its_next_is_not() -> None:
    assert same(nets(MOON, 1, mu=5.0), nets(FedAvg, 1))
    assert not same(nets(MOON, 3, mu=5.0), nets(FedAvg, 3))


def test_delta_sgd_sees_one_mask_and_updates_statistics_once_a_step() -> None:
    """As FedAvg's client: counters of batches are equal."""
    settings = {"solver": "delta-sgd"}
    found, plain = nets(MOON, 3, local=settings), nets(FedAvg, 3, local=settings)
    counter = [*net().state_dict()].index("norm.num_batches_tracked")
    assert found[counter] == plain[counter] > 0
    assert all(np.isfinite(array).all() for array in found)
    assert same(nets(MOON, 3, mu=0.0, local=settings), plain)


def test_state_in_a_directory_gives_the_same_model_as_in_the_context(tmp_path: Any) -> None:
    problems = quadratics(4)
    app = make_client_app(problems, store=lambda c: DirectoryStore(tmp_path, client_id(c)))
    np.testing.assert_array_equal(
        train(strategy(fraction_train=0.5), InProcessGrid(app, 4), 5),
        train(strategy(fraction_train=0.5), grid(problems), 5),
    )


def test_mu_and_tau_follow_their_schedules() -> None:
    one = strategy(mu={1: 5.0, 3: 0.0}, tau={1: 0.5, 2: 1.0})
    assert [{k: one.request(r, 0)[k] for k in ("mu", "tau")} for r in (1, 2, 3)] == [
        {"mu": 5.0, "tau": 0.5},
        {"mu": 5.0, "tau": 1.0},
        {"mu": 0.0, "tau": 1.0},
    ]


@pytest.mark.parametrize(
    ("hyperparameters", "message"),
    [
        ({"mu": -0.1}, r"mu must be >= 0, got -0.1"),
        ({"mu": "much"}, r"mu must be a finite number >= 0, .*, got 'much'"),
        ({"tau": 0.0}, r"tau must be > 0, got 0.0"),
        ({"tau": {1: 0.5, 4: -1.0}}, r"tau must be > 0, got -1.0"),
        ({"weights": "size"}, r"weights must be one of \['samples', 'uniform'\], got 'size'"),
    ],
)
def test_bad_hyperparameters_are_refused_with_bound_and_value(
    hyperparameters: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        MOON(**hyperparameters)
