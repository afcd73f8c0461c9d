"""Per-FedBC: the meta-gradient, its reductions, the rule, and measuring after one step."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from laws import RATE, START, local, quiet, train
from problems import DIM, Formula, Quadratic, grid, kept, quadratics, to_record, to_vector
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from clients import Batch, Border, ContextStore, LocalTraining, PerFedBCClient, Problem, client_app
from clients.base import FederatedClient
from clients.node.in_process import InProcessGrid
from fl_strategies import FedAvg, FedBC, PerFedBC, per_fedbc
from fl_strategies.core.oracle import Tally
from fl_strategies.core.randomness import stream
from fl_strategies.proximity import Dual, State, Turn, dual_of, first_state, server_rule

DUAL = Dual(0.01, 0.02, "heuristic", 0.0, 5.0, 0.0)


strategy = partial(quiet, PerFedBC, alpha=0.01, inner_rate=0.05)


def inner_end(q: Quadratic, w: np.ndarray, z: np.ndarray, lam: float, a: float, J: int) -> Any:
    """Return where J inner steps end: towards the penalised minimiser p, (I - a H)^J of the way."""
    H = q.A + 2 * lam * np.eye(DIM)
    p = q.argmin(pull=2 * lam, centre=z)
    return p + np.linalg.matrix_power(np.eye(DIM) - a * H, J) @ (w - p)


@pytest.mark.parametrize("J", [1, 3])
def test_an_outer_step_goes_along_the_gradient_at_the_end_of_the_inner_steps(J: int) -> None:
    (q,) = quadratics(1)
    w, z, lam, a, b = START, START - 1.0, 0.4, 0.07, 0.11
    new, _ = per_fedbc.outer_step(
        w, z, q.oracle(), Tally(), lam=lam, inner_rate=a, inner_steps=J, rate=b
    )
    expected = w - b * q.A @ (inner_end(q, w, z, lam, a, J) - q.b)
    np.testing.assert_allclose(new, expected, rtol=1e-12)


def test_the_direction_of_an_outer_step_is_the_meta_gradient_but_for_second_derivatives() -> None:
    """d/dw f(u(w)) = (I - a H)^J grad f(u): by automatic differentiation, and then undone."""
    (q,) = quadratics(1)
    lam, a, J = 0.4, 0.07, 2
    A, b, z = torch.tensor(q.A), torch.tensor(q.b), torch.tensor(START - 1.0)
    w = torch.tensor(START, requires_grad=True)
    u = w
    for _ in range(J):
        u = u - a * (A @ (u - b) + 2 * lam * (u - z))
    (0.5 * (u - b) @ A @ (u - b)).backward()
    jacobian = np.linalg.matrix_power(np.eye(DIM) - a * (q.A + 2 * lam * np.eye(DIM)), J)
    assert w.grad is not None
    first_order = np.linalg.solve(jacobian, w.grad.numpy())
    new, _ = per_fedbc.outer_step(
        START, START - 1.0, q.oracle(), Tally(), lam=lam, inner_rate=a, inner_steps=J, rate=1.0
    )
    np.testing.assert_allclose(START - new, first_order, rtol=1e-10)


def test_a_round_takes_k_outer_steps_from_z_and_the_dual_step_of_fedbc() -> None:
    """K = 3 from z, not from the client's x; lambda and gamma by hand."""
    (q,) = quadratics(1)
    state = State(x=START + 7.0, lam=0.4, gamma=2.0)
    new = per_fedbc.client_rule(
        state, START, Formula(q.gradient, lr=0.11, steps=3), dual=DUAL, inner_rate=0.07,
        inner_steps=1,
    ).state  # fmt: skip
    w = START
    for _ in range(3):
        w = w - 0.11 * q.A @ (inner_end(q, w, START, 0.4, 0.07, 1) - q.b)
    np.testing.assert_allclose(new.x, w, rtol=1e-12)
    assert new.lam == pytest.approx(0.4 + 0.01 * (((w - START) ** 2).sum() - 2.0))
    assert new.gamma == pytest.approx(2.0 + 0.02 * 0.4)


def test_the_duals_of_per_fedbc_are_those_of_fedbc_for_the_same_model() -> None:
    (q,) = quadratics(1)
    state, turn = State(x=START, lam=0.4, gamma=2.0, v=1.0, u=0.5, clock=3), Turn(9, 4)
    dual = DUAL._replace(dual_momentum=0.5)
    new = per_fedbc.client_rule(
        state, START, Formula(q.gradient, lr=0.1, steps=2), dual=dual, turn=turn,
        inner_rate=0.0, inner_steps=1,
    ).state  # fmt: skip
    from fl_strategies import fedbc

    found = Formula(minimiser=lambda start, sub: new.x)
    same = fedbc.client_rule(state, START, found, dual=dual, turn=turn).state
    assert new[1:] == same[1:]


def test_without_inner_steps_and_dual_it_is_fedavg_with_uniform_weights() -> None:
    problems, options = quadratics(3), {"fraction_evaluate": 0.0, "local": local()}
    averaged = train(FedAvg(weights="uniform", **options), grid(problems), 4)
    found = train(strategy(lambda_max=0.0, inner_rate=0.0), grid(problems), 4)
    np.testing.assert_allclose(found, averaged, rtol=1e-13)


def test_a_round_through_flower_equals_the_pure_rule_on_mini_batches_to_the_bit() -> None:
    """Every gradient takes the next mini-batch; an epoch is as many outer steps as batches."""
    problems = quadratics(3)
    settings = local(solver="sgd", epochs=2, **{"batch-size": 4})
    one = strategy(local=settings, inner_steps=2, dual_momentum=0.5)
    found = train(one, grid(problems), 2)
    dual = dual_of(one.request(1, 0))
    z, kept = START, [first_state(torch.tensor(START), dual=dual) for _ in problems]
    clock = 0
    for server_round in (1, 2):
        order = stream(0, "dual-steps", clock).permutation([0, 1, 2]).tolist()
        for i, q in enumerate(problems):
            problem, rng = q.problem(), stream(0, "meta", server_round, i)
            queue: list[Batch] = []

            def gradient(w: Tensor, q: Any = problem, rng: Any = rng, queue: Any = queue) -> Tensor:
                if not queue:
                    queue.extend(q.data.batches(rng, 4))
                x, y, _ = queue.pop(0)
                return x.T @ (x @ w - y) / len(y)

            kept[i] = per_fedbc.client_rule(
                kept[i], torch.tensor(z),
                Formula(gradient, lr=RATE, steps=2 * -(-q.n // 4)), dual=dual,
                turn=Turn(clock + order.index(i), 2 - order.index(i)),
                inner_rate=0.05, inner_steps=2,
            ).state  # fmt: skip
        clock += 3
        z = server_rule((state.x.numpy(), state.lam) for state in kept)[0]
    np.testing.assert_allclose(found, z, rtol=1e-12)


def test_steps_epochs_and_their_draw_decide_the_number_of_outer_steps() -> None:
    problems = quadratics(2)  # 7 and 9 examples
    for settings, expected in (
        ({"steps": 5, "batch-size": 4, "solver": "sgd"}, {5}),
        ({"epochs": 3, "batch-size": 4, "solver": "sgd"}, {6, 9}),
        ({"epochs": 3, "batch-size": 0, "solver": "sgd"}, {3}),
        ({"epochs": 3, "solver": "gd"}, {3}),
        ({"epochs": 3, "solver": "gd", "random-epochs": True}, {1, 2, 3}),
    ):
        seen: set[float] = set()
        one = strategy(
            local=local(**settings),
            callbacks=[lambda info, s=seen: s.update(r["steps"] for r in info.clients.values())],
        )
        train(one, grid(problems), 8)
        assert seen == expected


def test_the_training_loss_is_reported() -> None:
    (q,) = quadratics(1)
    one = strategy(local=local(epochs=1), inner_rate=0.0)
    result = one.start(grid([q]), to_record(START), 1)
    metrics = result.train_metrics_clientapp[1]
    assert metrics["train-loss"] == pytest.approx(q.value(START), rel=1e-12)


@pytest.mark.parametrize(
    ("hyperparameters", "message"),
    [
        ({"inner_rate": -0.1}, r"inner_rate must be >= 0, got -0.1"),
        ({"inner_steps": 0}, r"inner_steps must be an integer >= 1, got 0"),
        ({"inner_steps": 1.5}, r"inner_steps must be an integer >= 1, got 1.5"),
        ({"local": {"solver": "adam"}}, r"solver must be one of \['sgd', 'gd'\], got 'adam'"),
        ({"local": {"momentum": 0.5}}, r"momentum must be 0.0, got 0.5"),
        ({"local": {"weight-decay": 0.1}}, r"weight-decay must be 0.0, got 0.1"),
        ({"local": {"residual": 0.0}}, r"residual must not be set, got 0.0"),
    ],
)
def test_what_is_no_plain_gradient_step_is_refused(
    hyperparameters: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        PerFedBC(**hyperparameters)


# ---- measuring after one gradient step ----------------------------------------------------------


@pytest.mark.parametrize("where", ["train", "test-batch"])
def test_models_are_measured_after_one_step_on_the_examples_asked_for(where: str) -> None:
    """By linear algebra: own model x_i and z, each one step of rate 0.3 on, on unseen examples."""
    train_on, test_on = quadratics(1)[0], quadratics(2)[1]
    model = Border(nn_linear())
    problem, test = train_on.problem(model), test_on.problem(model)

    def client_fn(context: Any) -> PerFedBCClient:
        return PerFedBCClient(problem, client_id=0, test=test, store=ContextStore(context))

    settings = local(**{"fine-tune": where, "fine-tune-lr": 0.3})
    seen: list[Any] = []
    one = strategy(fraction_evaluate=1.0, local=settings, callbacks=[seen.append])
    result = one.start(InProcessGrid(client_app(client_fn), 1), to_record(START), 2)
    z = to_vector(result.arrays)  # with one client, z is its x
    step_on = train_on if where == "train" else test_on
    expected = test_on.value(z - 0.3 * step_on.gradient(z))
    row = seen[-1].clients[0]
    assert row["eval-loss"] == pytest.approx(test_on.value(z), rel=1e-12)
    assert row["own-loss"] == pytest.approx(test_on.value(z), rel=1e-12)
    assert row["tuned-loss"] == pytest.approx(expected, rel=1e-12)
    assert row["own-tuned-loss"] == pytest.approx(expected, rel=1e-12)
    untouched = one.start(InProcessGrid(client_app(client_fn), 1), to_record(START), 2).arrays
    np.testing.assert_array_equal(to_vector(untouched), z)  # measuring changes nothing


def nn_linear() -> nn.Module:
    from problems import Linear

    return Linear()


def test_the_own_model_is_tuned_from_itself_and_at_the_training_rate_by_default() -> None:
    problems = quadratics(3)
    seen: list[Any] = []
    one = FedBC(
        alpha=0.01, fraction_evaluate=1.0, local=local(**{"fine-tune": "train"}),
        callbacks=[seen.append],
    )  # fmt: skip
    federation = grid(problems)
    result = one.start(federation, to_record(START), 2)
    z = to_vector(result.arrays)
    states = kept(federation, one.ledger.acked)
    for q, state, row in zip(problems, states, seen[-1].clients.values(), strict=True):
        own = state["x"] - RATE * q.gradient(state["x"])
        assert row["own-tuned-loss"] == pytest.approx(q.value(own), rel=1e-12)
        tuned = q.value(z - RATE * q.gradient(z))
        assert row["tuned-loss"] == pytest.approx(tuned, rel=1e-12)


def test_a_stateless_client_measures_the_common_model_after_a_step() -> None:
    problems = quadratics(2)
    seen: list[Any] = []
    one = FedAvg(
        fraction_evaluate=1.0, local=local(**{"fine-tune": "train"}), callbacks=[seen.append]
    )
    z = to_vector(one.start(grid(problems), to_record(START), 1).arrays)
    for q, row in zip(problems, seen[-1].clients.values(), strict=True):
        expected = q.value(z - RATE * q.gradient(z))
        assert row["tuned-loss"] == pytest.approx(expected, rel=1e-12)
        assert "own-tuned-loss" not in row


def test_tuning_leaves_running_statistics_to_the_received_model() -> None:
    """BatchNorm: what is measured second does not depend on what was tuned first."""
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Dropout(0.5), nn.Linear(4, 2))
    model = Border(module.to(torch.float64))
    rng = np.random.default_rng(1)
    x, y = torch.tensor(rng.normal(2, 3, (12, 3))), torch.tensor(rng.integers(0, 2, 12))
    problem = Problem(model, cross_entropy, x, y)
    arrays = model.arrays(model.vector)

    def measured(fine_tune: str) -> dict[str, Any]:
        training = LocalTraining(lr=0.1, fine_tune=fine_tune, batch_size=4)

        class Mine(FederatedClient):
            algorithm = "mine"
            state_type = State

            def first_state(self, theta: Tensor, config: Any) -> State:
                return State(theta, 0.0, 0.0)

            @staticmethod
            def personalized_model(state: State) -> Tensor:
                own: Tensor = state.x
                return own

        class Empty:
            def rounds(self, owner: Any) -> list[int]:
                return []

        client = Mine(problem, client_id=0, test=problem, store=Empty(), training=training)  # type: ignore[arg-type]
        return client.evaluate(arrays, {"acked-round": -1})[2]

    plain, tuned = measured("off"), measured("train")
    assert tuned["own-loss"] == plain["own-loss"]
    assert tuned["own-tuned-loss"] == tuned["tuned-loss"] != plain["own-loss"]
    assert tuned["tuned-accuracy"] == measured("train")["tuned-accuracy"]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"fine_tune": "test"}, r"fine_tune must be one of \['off', 'train', 'test-batch'\], got"),
        ({"fine_tune_lr": -0.1}, r"fine_tune_lr must be >= 0, got -0.1"),
    ],
)
def test_bad_settings_of_the_step_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        LocalTraining(**settings)
