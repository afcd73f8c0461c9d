"""Laws of networks in tutorials' idioms: whatever PyTorch trains is trained, and just so."""

from __future__ import annotations

import copy
import io
import logging
import pickle
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import ArrayRecord, Context
from idioms import (
    CLASSES,
    IDIOMS,
    Convolved,
    Functional,
    Idiom,
    Quickstart,
    reshaped,
    small,
    viewed,
)
from laws import TABLE, Row, every_algorithm, local
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import cross_entropy

from clients import (
    AnyAlgorithmClient,
    ContextStore,
    FlatModel,
    LocalTraining,
    Problem,
    client_app,
    client_id,
    solve,
)
from clients.node.in_process import InProcessGrid
from clients.stacking.obstacles import obstacle
from clients.stacking.oracle import StackOracle
from clients.stacking.stack import joined
from fl_strategies.core.log import log_once
from fl_strategies.core.randomness import stream
from fl_strategies.core.subproblem import Subproblem

SETTINGS = LocalTraining(solver="sgd", lr=0.1, epochs=2, batch_size=3)
SAMPLES = 8
WITHIN = {torch.float64: 1e-12, torch.float32: 1e-4}
every_idiom = pytest.mark.parametrize("idiom", IDIOMS.values(), ids=list(IDIOMS))
both_types = pytest.mark.parametrize("dtype", list(WITHIN), ids=["float64", "float32"])


def plain(x: Tensor) -> Tensor:
    """Return inputs as PyTorch's programs have them."""
    return x.clone(memory_format=torch.contiguous_format)


def made(make: Callable[[], nn.Module], dtype: torch.dtype) -> tuple[FlatModel, nn.Module]:
    """Return a model, and a twin that PyTorch has alone."""
    torch.manual_seed(1)
    module = make().to(dtype)
    twin = copy.deepcopy(module)
    return FlatModel(module), twin


def trained_by_torch(
    twin: nn.Module, problem: Problem, client: int = 0, lr: float = 0.1
) -> dict[str, Tensor]:
    """Return the twin's arrays after the problem's mini-batches, as PyTorch trains."""
    torch.manual_seed(7)
    twin.train()
    optimizer = torch.optim.SGD([p for p in twin.parameters() if p.requires_grad], lr=lr)
    rng = stream(client, "t")
    for _ in range(2):
        for x, y in problem.batches(rng, 3):
            optimizer.zero_grad()
            cross_entropy(twin(plain(x)), y).backward()
            optimizer.step()
    return twin.state_dict()


def assert_close(found: dict[str, Tensor], expected: dict[str, Tensor], within: float) -> None:
    assert found.keys() == expected.keys()
    for name, array in expected.items():
        apart = (found[name] - array).to(torch.float64).norm()
        assert apart <= within * max(1.0, array.to(torch.float64).norm()), name


def trains_as_torch_does(idiom: Idiom, dtype: torch.dtype, lr: float = 0.1) -> None:
    model, twin = made(idiom.make, dtype)
    problem = Problem(model, cross_entropy, *idiom.samples(SAMPLES))
    expected = trained_by_torch(twin, problem, lr=lr)
    torch.manual_seed(7)
    solve(problem, model.vector.clone(), Subproblem(), replace(SETTINGS, lr=lr), stream(0, "t"))
    assert_close(model.module.state_dict(), expected, WITHIN[dtype])
    twin.eval()
    outputs = twin(plain(problem.inputs))
    loss = cross_entropy(outputs, problem.targets).item()
    assert problem.evaluate().loss == pytest.approx(loss, rel=10 * WITHIN[dtype])


@both_types
@every_idiom
def test_a_network_is_trained_as_pytorch_trains_it(idiom: Idiom, dtype: torch.dtype) -> None:
    trains_as_torch_does(idiom, dtype)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["resnet18", "mobilenet_v2"])
def test_a_torchvision_network_is_trained_as_pytorch_trains_it(name: str) -> None:
    models = pytest.importorskip("torchvision.models")
    make = getattr(models, name)
    idiom = Idiom(lambda: make(num_classes=CLASSES), (3, 64, 64))
    trains_as_torch_does(idiom, torch.float64, lr=1e-5)  # larger steps amplify roundings


@pytest.mark.filterwarnings("ignore:There is a performance drop")  # of attention under vmap
@every_idiom
def test_a_stack_is_trained_as_pytorch_trains_each_client(idiom: Idiom) -> None:
    dtype = torch.float64
    model, twin = made(idiom.make, dtype)
    problems = [
        Problem(model, cross_entropy, *idiom.samples(SAMPLES - client, client))
        for client in range(2)
    ]
    if not idiom.stacks:
        assert obstacle(problems[0])
        return
    assert [obstacle(problem) for problem in problems] == ["", ""]
    rngs = [stream(client, "t") for client in range(2)]
    oracle = StackOracle(problems, SETTINGS, rngs, lambda purpose: rngs, seeds=[7, 7])
    found = oracle.solve(model.vector.expand(2, -1).clone(), Subproblem()).w
    for client, problem in enumerate(problems):
        expected = trained_by_torch(copy.deepcopy(twin), problem, client)
        model.vector.copy_(found[client])
        assert_close(model.module.state_dict(), expected, WITHIN[dtype])


@every_idiom
def test_a_networks_hessian_is_that_of_pytorch(idiom: Idiom) -> None:
    model, twin = made(idiom.make, torch.float64)
    problem = Problem(model, cross_entropy, *idiom.samples(SAMPLES))
    v = torch.randn(len(model.vector), generator=torch.Generator().manual_seed(2)).double()
    for module in (model.module, twin):
        module.train()
    torch.manual_seed(7)
    found = problem.hessian_product(*problem.whole, v)
    torch.manual_seed(7)
    with sdpa_kernel(SDPBackend.MATH):  # others have no second derivative
        loss = cross_entropy(twin(plain(problem.inputs)), problem.targets)
    trained = [p for p in twin.parameters() if p.requires_grad]
    slopes = torch.autograd.grad(loss, trained, create_graph=True)
    along = sum((g * u).sum() for g, u in zip(slopes, model.views(v), strict=True))
    pieces = torch.autograd.grad(along, trained, materialize_grads=True)
    expected = joined([piece[None] for piece in pieces])[0]
    assert (found - expected).norm() <= 1e-11 * max(1.0, expected.norm())


@every_idiom
def test_a_users_own_call_of_the_module_gives_what_pytorch_gives(idiom: Idiom) -> None:
    model, twin = made(idiom.make, torch.float64)
    x, _ = idiom.samples(SAMPLES)
    twin.eval(), model.module.eval()
    expected = twin(x)
    for module in (
        model.module,
        copy.deepcopy(model.module),
        FlatModel(copy.deepcopy(model.module)).module,
    ):
        assert torch.allclose(module(x), expected, rtol=1e-12, atol=1e-12)
        assert torch.allclose(module.forward(x), expected, rtol=1e-12, atol=1e-12)


def run_of(row: Row, flat: Callable[[Tensor], Tensor], hosts: int, **options: Any) -> Any:
    """Return the model after two rounds with three clients, alone or stacked."""
    model = made(small(flat), torch.float64)[0]
    problems = [Problem(model, cross_entropy, *IDIOMS["view"].samples(6 + i, i)) for i in range(3)]

    def client_fn(context: Context) -> AnyAlgorithmClient:
        me = client_id(context)
        return AnyAlgorithmClient(problems[me], client_id=me, store=ContextStore(context))

    app = client_app(client_fn, hosts=[*range(3)] if hosts else None, stack=3)
    initial = ArrayRecord(model.state_dict())
    strategy = row.strategy(local=local(lr=0.05, **options))
    result = strategy.start(InProcessGrid(app, 3, hosts=hosts), initial, 2)
    assert {m["clients-used"] for m in result.train_metrics_clientapp.values()} <= {1, 2, 3}
    return np.concatenate([np.ravel(array) for array in result.arrays.to_numpy_ndarrays()])


@pytest.mark.sampled
@pytest.mark.parametrize("hosts", [0, 1], ids=["alone", "stacked"])
@every_algorithm
def test_every_algorithm_trains_what_views_as_what_reshapes(row: Row, hosts: int) -> None:
    found, expected = (run_of(row, flat, hosts) for flat in (viewed, reshaped))
    assert np.linalg.norm(found - expected) <= 1e-11 * np.linalg.norm(expected)


@pytest.mark.parametrize("solver", ["sgd", "adam", "delta-sgd", "sps", "lbfgs"])
def test_every_solver_trains_what_views_as_what_reshapes(solver: str) -> None:
    row = next(row for row in TABLE if row.name == "fedavg")
    options = {"solver": solver} | ({} if solver == "lbfgs" else {"batch-size": 4})
    found, expected = (run_of(row, flat, 0, **options) for flat in (viewed, reshaped))
    assert np.linalg.norm(found - expected) <= 1e-11 * np.linalg.norm(expected)


@pytest.mark.parametrize("of", [torch.bool, torch.complex128, torch.int8])
def test_inputs_reach_the_module_as_they_are_but_small_integers_as_int64(of: torch.dtype) -> None:
    seen: list[Tensor] = []

    class Seeing(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            seen.append(x)
            return super().forward((x != 0).to(self.weight.dtype))

    x = torch.arange(SAMPLES * 6).reshape(SAMPLES, 6).remainder(3).to(of)
    model = FlatModel(Seeing(6, CLASSES).double())
    Problem(model, cross_entropy, x, torch.zeros(SAMPLES, dtype=torch.int64)).evaluate()
    assert torch.equal(seen[0], x)
    assert seen[0].dtype == (torch.int64 if of == torch.int8 else of)


def test_one_image_updates_batchnorm_and_frozen_statistics_stay() -> None:
    class Frozen(nn.BatchNorm2d):
        def train(self, mode: bool = True) -> Frozen:
            return super().train(False)

    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = Convolved(nn.Sequential(nn.BatchNorm2d(2), Frozen(2)), 72)

        def forward(self, x: Tensor) -> Tensor:
            return self.net(x)

    model, twin = made(Both, torch.float64)
    problem = Problem(model, cross_entropy, *IDIOMS["view"].samples(4))  # batches of 3 and of 1
    expected = trained_by_torch(twin, problem)
    solve(problem, model.vector.clone(), Subproblem(), SETTINGS, stream(0, "t"))
    assert_close(model.module.state_dict(), expected, WITHIN[torch.float64])
    counts = [b for name, b in model.module.named_buffers() if name.endswith("tracked")]
    assert [int(count) for count in counts] == [4, 0]


def test_a_replaced_buffer_of_another_shape_is_refused() -> None:
    class Growing(nn.Linear):
        def __init__(self) -> None:
            super().__init__(6, CLASSES)
            self.register_buffer("seen", torch.zeros(1))

        def forward(self, x: Tensor) -> Tensor:
            self.seen = torch.cat([self.seen, self.seen])
            return super().forward(x)

    problem = Problem(FlatModel(Growing()), cross_entropy, *IDIOMS["averaged"].samples(4))
    with pytest.raises(ValueError, match=r"the buffer 'seen' \(2,\), it was \(1,\)"):
        problem.full_gradient()


def test_a_module_that_was_pickled_needs_what_it_needed() -> None:
    model, _ = made(Quickstart, torch.float64)
    x, _ = IDIOMS["quickstart"].samples(2)
    assert torch.equal(pickle.loads(pickle.dumps(model.module))(x), model.module(x))


def test_a_repeated_pass_draws_the_masks_and_counts_the_batches_of_one(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def make() -> nn.Module:
        parts = [nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.Dropout(0.5)]
        return Convolved(nn.Sequential(*parts), 64)

    log_once.cache_clear()
    model, twin = made(make, torch.float64)
    x, _ = IDIOMS["view"].samples(SAMPLES)
    with caplog.at_level(logging.INFO):
        for _ in range(2):
            for module in (model.module, twin):
                module.train()
                torch.manual_seed(5)
                module.outputs = module(x).detach()
            assert torch.allclose(model.module.outputs, twin.outputs, rtol=1e-12)
            assert_close(model.module.state_dict(), twin.state_dict(), 1e-12)
    said = [record.message for record in caplog.records if "contiguous" in record.message]
    assert len(said) == 1
    assert said[0].startswith("Convolved views activations that are not contiguous")


@pytest.mark.parametrize("make", [small(viewed), Functional], ids=["convolved", "functional"])
def test_the_vector_and_its_order_stay_when_a_pass_is_repeated(
    make: Callable[[], nn.Module],
) -> None:
    model, _ = made(make, torch.float64)
    before, places = model.vector.clone(), [p.data_ptr() for p in model.shared]
    x, _ = IDIOMS["view"].samples(SAMPLES)
    model.module(x).sum().backward()
    assert torch.equal(model.vector, before)
    assert [p.data_ptr() for p in model.module.parameters()] == places
    assert all(isinstance(p, nn.Parameter) for p in model.module.parameters())
    assert model.gradient.norm() > 0.0


def test_other_errors_pass_and_a_pass_is_not_repeated_for_them() -> None:
    calls = []

    def wrong(x: Tensor) -> Tensor:
        calls.append(1)
        raise RuntimeError("mat1 and mat2 shapes cannot be multiplied")

    model, _ = made(small(wrong), torch.float64)
    with pytest.raises(RuntimeError, match=r"^mat1 and mat2"):
        model.module(IDIOMS["view"].samples(2)[0])
    assert len(calls) == 1


def test_a_network_that_fails_in_pytorch_fails_alike() -> None:
    model, twin = made(small(lambda x: x.transpose(1, 3).view(len(x), -1)), torch.float64)
    x, _ = IDIOMS["view"].samples(2)
    for module in (twin, model.module, model.module):
        with pytest.raises(RuntimeError, match="view size is not compatible"):
            module(x)
    np.testing.assert_array_equal(model.vector, model.trained)


def test_a_network_of_pytorchs_layers_alone_is_called_as_it_is() -> None:
    module = nn.Sequential(nn.Conv2d(2, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(64, 3))
    assert "forward" not in vars(FlatModel(module).module)


def reloaded(module: Any) -> Any:
    file = io.BytesIO()
    torch.jit.save(module, file)
    file.seek(0)
    return torch.jit.load(file)


@pytest.mark.filterwarnings("ignore:.torch.jit")
@pytest.mark.parametrize("again", [False, True], ids=["made", "loaded"])
@pytest.mark.parametrize("kind", ["script", "trace"])
def test_torchscript_trains_as_the_module_that_it_was_made_of(kind: str, again: bool) -> None:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Conv2d(2, 3, 3, padding=1), nn.Flatten(), nn.Linear(48, 3)).double()
    x, y = torch.randn(8, 2, 4, 4, dtype=torch.float64), torch.arange(8) % 3
    same = copy.deepcopy(module)
    script: Any = torch.jit.script(same) if kind == "script" else torch.jit.trace(same, x)
    vectors = []
    for one in (module, reloaded(script) if again else script):
        problem = Problem(FlatModel(one), cross_entropy, x, y)
        start = problem.model.vector.clone()
        vectors.append(solve(problem, start, Subproblem(), SETTINGS, stream(1, "t")).w)
    torch.testing.assert_close(vectors[1], vectors[0], rtol=1e-12, atol=1e-14)
