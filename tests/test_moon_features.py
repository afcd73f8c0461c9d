"""MOON: what its fixed models are, and what counts as features."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch
from dropout_net import MU, TAU, arrays, examples, net, net_problem, nets, same
from problems import oracle_of
from torch import Tensor, nn

from clients import Border, LocalTraining, MOONClient, Problem, Received, solve
from clients import moon as moon_module
from clients.moon import Contrast, with_features
from fl_strategies import MOON, FedAvg
from fl_strategies.core.subproblem import Subproblem
from simulations import models

# ---- the fixed models ---------------------------------------------------------------------------


def test_the_fixed_models_are_whole_models_in_evaluation_mode_and_leave_no_trace() -> None:
    received, previous = net(2), net(3)
    problem = net_problem()
    problem.model.load(arrays(previous))
    client = MOONClient(problem, client_id=0)
    kept = client.first_state(problem.model.vector.clone(), {})
    theta = problem.model.load(arrays(received))
    problem.model.write(-theta)  # theta is what counts, wherever the module stands
    problem.model.module.train()
    before = torch.get_rng_state()
    found = moon_module.contrast(problem, kept, theta, mu=MU, tau=TAU)
    assert torch.equal(torch.get_rng_state(), before)
    for ours, theirs in zip(problem.model.module.buffers(), received.buffers(), strict=True):
        assert torch.equal(ours, theirs)
    with torch.no_grad():
        unit = [
            nn.functional.normalize(module.eval().seen(problem.tensors.inputs))
            for module in (previous, received)
        ]
    torch.testing.assert_close(found.q, (unit[0] - unit[1]) / TAU, rtol=1e-10, atol=1e-12)


def test_what_is_kept_is_the_trained_model_with_its_own_running_statistics() -> None:
    problem = net_problem()
    client = MOONClient(problem, client_id=0, training=LocalTraining(batch_size=4, epochs=2))
    theta = problem.model.vector.clone()
    torch.manual_seed(0)
    rng = np.random.default_rng(0)
    oracle = oracle_of(problem, client.training, rng)
    config = {"mu": MU, "tau": TAU}
    step = client.step(client.first_state(theta, {}), Received(theta), oracle, config)
    assert torch.equal(step.state.w, step.upload)
    assert not torch.equal(step.upload, theta)
    norm = problem.model.module.norm
    expected = torch.cat([norm.running_mean, norm.running_var])
    assert torch.equal(step.state.statistics, expected)
    assert not torch.equal(expected, torch.cat([net().norm.running_mean, net().norm.running_var]))


def test_a_step_runs_the_model_once_so_that_features_and_outputs_share_their_masks() -> None:
    problem = net_problem(9)
    q = torch.zeros(9, 6, dtype=torch.float64)
    training = LocalTraining(batch_size=4, epochs=3)
    contrast = Contrast(problem, q, mu=MU)
    info = solve(
        contrast, problem.model.vector.clone(), Subproblem(), training, np.random.default_rng(0)
    )
    assert problem.model.module.passes == info.steps == 9
    assert not problem.model.module.out._forward_pre_hooks  # nothing is left on the module
    assert not problem.model.module.middle._forward_pre_hooks


# ---- what counts as features --------------------------------------------------------------------


def features(module: nn.Module, x: Tensor, **options: Any) -> Tensor:
    model = Border(module, **options)
    problem = Problem(model, lambda outputs, targets: outputs.sum(), x, torch.zeros(len(x)))
    return with_features(problem, x, torch.zeros(len(x)))[1]


def test_features_are_the_input_of_the_linear_layer_that_runs_last() -> None:
    x, module = examples(4)[0], net().eval()
    torch.testing.assert_close(features(module, x), module.seen(x))


def test_another_head_can_be_named() -> None:
    x, module = examples(4)[0], net().eval()
    torch.testing.assert_close(features(module, x, head="norm"), module.conv(x).flatten(1))
    with pytest.raises(ValueError, match=r"head must be one of .*'middle'.*, got 'classifier'"):
        Border(net(), head="classifier")


def test_a_model_without_features_is_refused(caplog: pytest.LogCaptureFixture) -> None:
    convolution = nn.Sequential(nn.Conv2d(1, 3, 4), nn.Flatten()).double()
    with pytest.raises(ValueError, match=r"it has no nn\.Linear that runs: name the module"):
        features(convolution, examples(4)[0])
    by_pixel = nn.Sequential(nn.Flatten(0), nn.Unflatten(0, (-1, 2)), nn.Linear(2, 2)).double()
    with pytest.raises(ValueError, match="it has 32 rows for 4 inputs: name the module"):
        features(by_pixel, examples(4)[0])
    nets(MOON, 1, lambda: copy.deepcopy(convolution))
    assert "it has no nn.Linear that runs: name the module" in caplog.text


@pytest.mark.parametrize("name", sorted(models.MODELS.keys() - {"resnet50"}))  # resnet18's, deeper
def test_every_model_of_the_simulations_has_features(name: str) -> None:
    module = models.build(name, (1, 16, 16), 3, seed=1).eval()
    x = torch.randn(5, 1, 16, 16, generator=torch.Generator().manual_seed(3))
    found = features(module, x)
    last = [layer for layer in module.modules() if isinstance(layer, nn.Linear)][-1]
    assert found.shape == (5, last.in_features)
    assert found.requires_grad == (not name.startswith(("logistic", "binary")))
    if not found.requires_grad:
        assert torch.equal(found, x.flatten(1))


def test_with_features_that_no_parameter_moves_it_is_fedavg_and_says_so_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def logistic() -> nn.Module:
        return models.build("logistic", (1, 4, 4), 3, seed=0).double()

    moon_module.warn_of_no_effect.cache_clear()
    assert same(nets(MOON, 3, logistic), nets(FedAvg, 3, logistic))
    assert caplog.text.count("features do not depend on its parameters: with it MOON") == 1
