"""Laws of networks in tutorials' idioms: whatever PyTorch trains is trained, and just so."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from flwr.app import ArrayRecord, Context
from idioms import (
    CLASSES,
    IDIOMS,
    Idiom,
)
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import cross_entropy, dropout

from clients import (
    AnyAlgorithmClient,
    Border,
    ContextStore,
    LocalTraining,
    Problem,
    client_app,
    client_id,
    solve,
)
from clients.node.in_process import InProcessGrid
from fl_strategies import STRATEGIES
from fl_strategies.core.randomness import stream
from fl_strategies.core.subproblem import Subproblem

SETTINGS = LocalTraining(solver="sgd", lr=0.1, epochs=2, batch_size=3)
SAMPLES = 8
WITHIN = {torch.float64: 1e-12, torch.float32: 1e-4}
every_idiom = pytest.mark.parametrize("idiom", IDIOMS.values(), ids=list(IDIOMS))
both_types = pytest.mark.parametrize("dtype", list(WITHIN), ids=["float64", "float32"])


def made(make: Callable[[], nn.Module], dtype: torch.dtype) -> tuple[Border, nn.Module]:
    """Return a model, and a twin that PyTorch has alone."""
    torch.manual_seed(1)
    module = make().to(dtype)
    twin = copy.deepcopy(module)
    return Border(module), twin


def trained_by_torch(
    twin: nn.Module, problem: Problem, client: int = 0, lr: float = 0.1
) -> dict[str, Tensor]:
    """Return the twin's arrays after the problem's mini-batches, as PyTorch trains."""
    torch.manual_seed(7)
    twin.train()
    optimizer = torch.optim.SGD([p for p in twin.parameters() if p.requires_grad], lr=lr)
    rng = stream(client, "t")
    for _ in range(2):
        for x, y, _ in problem.data.batches(rng, 3):
            optimizer.zero_grad()
            cross_entropy(twin(x), y).backward()
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
    outputs = twin(problem.tensors.inputs)
    loss = cross_entropy(outputs, problem.tensors.targets).item()
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


@every_idiom
def test_a_networks_hessian_is_that_of_pytorch(idiom: Idiom) -> None:
    model, twin = made(idiom.make, torch.float64)
    problem = Problem(model, cross_entropy, *idiom.samples(SAMPLES))
    v = torch.randn(len(model.vector), generator=torch.Generator().manual_seed(2)).double()
    for module in (model.module, twin):
        module.train()
    torch.manual_seed(7)
    found = problem.hessian_product(problem.data.whole, v)
    torch.manual_seed(7)
    with sdpa_kernel(SDPBackend.MATH):  # others have no second derivative
        loss = cross_entropy(twin(problem.tensors.inputs), problem.tensors.targets)
    trained = [p for p in twin.parameters() if p.requires_grad]
    slopes = torch.autograd.grad(loss, trained, create_graph=True)
    along = sum((g * u).sum() for g, u in zip(slopes, model.views(v), strict=True))
    pieces = torch.autograd.grad(along, trained, materialize_grads=True)
    expected = torch.cat([piece.reshape(-1) for piece in pieces])
    assert (found - expected).norm() <= 1e-11 * max(1.0, expected.norm())


@pytest.mark.parametrize("of", [torch.bool, torch.complex128, torch.int8])
def test_inputs_reach_the_module_as_they_are_but_small_integers_as_int64(of: torch.dtype) -> None:
    seen: list[Tensor] = []

    class Seeing(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            seen.append(x)
            return super().forward((x != 0).to(self.weight.dtype))

    x = torch.arange(SAMPLES * 6).reshape(SAMPLES, 6).remainder(3).to(of)
    model = Border(Seeing(6, CLASSES).double())
    Problem(model, cross_entropy, x, torch.zeros(SAMPLES, dtype=torch.int64)).evaluate()
    assert torch.equal(seen[0], x)
    assert seen[0].dtype == (torch.int64 if of == torch.int8 else of)


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
        problem = Problem(one, cross_entropy, x, y)
        start = problem.model.vector.clone()
        vectors.append(solve(problem, start, Subproblem(), SETTINGS, stream(1, "t")).w)
    torch.testing.assert_close(vectors[1], vectors[0], rtol=1e-12, atol=1e-14)


class Drawing(nn.Module):
    """A network that draws whenever it is called: it adds noise, drops or masks."""

    def __init__(self, draw: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.draw, self.body, self.head = draw, nn.Linear(4, 6), nn.Linear(6, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.head(self.draw(self.body(x)))
        return found


@pytest.mark.parametrize(
    "draw",
    [
        lambda h: h + torch.randn_like(h),
        lambda h: dropout(h, 0.5, training=True),
        lambda h: h * torch.bernoulli(torch.full_like(h, 0.5)),
    ],
    ids=["vae", "monte-carlo dropout", "masking"],
)
@pytest.mark.parametrize("algorithm", ["fedavg", "ditto"])
def test_numbers_of_a_network_that_draws_in_evaluation_are_those_of_the_seed(
    algorithm: str, draw: Callable[[Tensor], Tensor]
) -> None:
    x = torch.randn(12, 4, generator=torch.Generator().manual_seed(1))
    models = [Border(Drawing(draw)) for _ in range(2)]
    initial = ArrayRecord(Drawing(draw).state_dict())

    def client_fn(context: Context) -> AnyAlgorithmClient:
        me = client_id(context)
        problem = Problem(models[me], cross_entropy, x, torch.arange(12) % CLASSES)
        return AnyAlgorithmClient(problem, client_id=me, test=problem, store=ContextStore(context))

    def reported(seed: int, rounds: int = 2) -> list[dict[str, Any]]:
        strategy = STRATEGIES[algorithm](
            local={"lr": 0.1, "steps": 2, "batch-size": 4, "fine-tune": "train"}, seed=seed
        )
        before = torch.get_rng_state()
        result = strategy.start(InProcessGrid(client_app(client_fn), 2), initial, rounds)
        assert torch.equal(torch.get_rng_state(), before)
        return [dict(row) for row in result.evaluate_metrics_clientapp.values()]

    rounds = reported(1)
    assert reported(1) == rounds
    assert reported(2, 1)[0]["eval-loss"] != rounds[0]["eval-loss"] != rounds[1]["eval-loss"]
