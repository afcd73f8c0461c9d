"""Loops of other libraries take the algorithm's steps: each equals a plain loop.

Mistakes these laws are written against: steps that do not get the terms or get them twice, terms
that are clipped with the gradients.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import ArrayRecord, Context
from torch import Tensor, nn
from torch.optim import SGD
from torch.utils.data import DataLoader, TensorDataset

from clients import (
    AnyAlgorithmClient,
    ContextStore,
    InProcessGrid,
    OwnTraining,
    client_app,
    client_id,
)
from fl_strategies import FedADMM

Loop = Callable[[nn.Module, DataLoader[Any]], None]
RATE, EPOCHS, MOMENTUM = 0.1, 3, 0.9
squared = nn.functional.mse_loss


def plain(module: nn.Module, loader: DataLoader[Any], clip: float = 0.0) -> None:
    """Clip each sample's gradient to ``clip``, if it is not 0, and take their mean."""
    optimizer = SGD(module.parameters(), RATE, momentum=MOMENTUM)
    for _ in range(EPOCHS):
        for x, y in loader:
            total = [torch.zeros_like(p) for p in module.parameters()]
            for i in range(len(x)):
                module.zero_grad()
                squared(module(x[i : i + 1]), y[i : i + 1]).backward()
                if clip:
                    nn.utils.clip_grad_norm_(module.parameters(), clip)
                for sum_, p in zip(total, module.parameters(), strict=True):
                    assert p.grad is not None
                    sum_ += p.grad / len(x)
            for sum_, p in zip(total, module.parameters(), strict=True):
                p.grad = sum_
            optimizer.step()


def by_lightning(module: nn.Module, loader: DataLoader[Any]) -> None:
    lightning = pytest.importorskip("lightning")

    class Wrapped(lightning.LightningModule):  # type: ignore[name-defined, misc]
        def __init__(self) -> None:
            super().__init__()
            self.module = module

        def training_step(self, batch: list[Tensor], index: int) -> Tensor:
            return squared(self.module(batch[0]), batch[1])

        def configure_optimizers(self) -> SGD:
            return SGD(self.parameters(), RATE, momentum=MOMENTUM)

    quiet = {"enable_progress_bar": False, "enable_model_summary": False}
    trainer = lightning.Trainer(
        max_epochs=EPOCHS, logger=False, enable_checkpointing=False, accelerator="cpu", **quiet
    )
    trainer.fit(Wrapped(), loader)


def by_accelerate(module: nn.Module, loader: DataLoader[Any]) -> None:
    accelerator = pytest.importorskip("accelerate").Accelerator(cpu=True)
    optimizer = SGD(module.parameters(), RATE, momentum=MOMENTUM)
    module, optimizer, loader = accelerator.prepare(module, optimizer, loader)
    for _ in range(EPOCHS):
        for x, y in loader:
            accelerator.backward(squared(module(x), y))
            optimizer.step()
            optimizer.zero_grad()


def by_trainer(module: nn.Module, loader: DataLoader[Any], folder: Path) -> None:
    transformers = pytest.importorskip("transformers")

    class Wrapped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.module = module

        def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
            return {"loss": squared(self.module(x), labels)}

    optimizer = SGD(module.parameters(), RATE, momentum=MOMENTUM)
    schedule = torch.optim.lr_scheduler.ConstantLR(optimizer, factor=1.0)
    quiet = {"save_strategy": "no", "report_to": "none", "disable_tqdm": True}
    arguments = transformers.TrainingArguments(
        str(folder),
        num_train_epochs=EPOCHS,
        per_device_train_batch_size=len(loader.dataset),  # type: ignore[arg-type]
        max_grad_norm=0.0,
        dataloader_pin_memory=False,
        use_cpu=True,
        **quiet,
    )
    samples = [{"x": x, "labels": y} for x, y in loader.dataset]
    transformers.Trainer(
        Wrapped(), arguments, train_dataset=samples, optimizers=(optimizer, schedule)
    ).train()


def by_opacus(module: nn.Module, loader: DataLoader[Any], clip: float = 1e6) -> None:
    """Without noise, and with the batches of the other loops."""
    private, optimizer, loader = (
        pytest.importorskip("opacus")
        .PrivacyEngine()
        .make_private(
            module=module,
            optimizer=SGD(module.parameters(), RATE, momentum=MOMENTUM),
            data_loader=loader,
            noise_multiplier=0.0,
            max_grad_norm=clip,
            poisson_sampling=False,
        )
    )
    for _ in range(EPOCHS):
        for x, y in loader:
            optimizer.zero_grad()
            squared(private(x), y).backward()
            optimizer.step()


def trained(loop: Loop) -> np.ndarray:
    """Return the model after three rounds of FedADMM with two clients."""

    def client_fn(context: Context) -> AnyAlgorithmClient:
        me = client_id(context)
        generator = torch.Generator().manual_seed(me)
        x = torch.randn(8, 3, generator=generator) + me
        data = TensorDataset(x, x[:, :1] - (3 + 2 * me) * x[:, 1:2] + 5)
        loader: DataLoader[Any] = DataLoader(data, len(data))
        problem = OwnTraining(nn.Linear(3, 1), lambda module, _: loop(module, loader), len(data))
        return AnyAlgorithmClient(problem, client_id=me, store=ContextStore(context))

    strategy = FedADMM(rho=0.7, fraction_evaluate=0.0, quiet=True)
    start = ArrayRecord({"weight": torch.ones(1, 3), "bias": torch.ones(1)})
    result = strategy.start(InProcessGrid(client_app(client_fn), 2), start, num_rounds=3)
    assert result.skipped == []
    return np.concatenate([array.numpy().ravel() for array in result.arrays.values()])


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.isinstance.treespec")  # by lightning
@pytest.mark.filterwarnings("ignore:The 'train_dataloader' does not have many workers")
@pytest.mark.filterwarnings("ignore:Secure RNG turned off:UserWarning")
@pytest.mark.filterwarnings("ignore:Full backward hook is firing:UserWarning")
@pytest.mark.parametrize("library", ["lightning", "accelerate", "trainer", "opacus"])
def test_a_librarys_loop_takes_the_steps_of_a_plain_one(library: str, tmp_path: Path) -> None:
    loops: dict[str, Loop] = {
        "lightning": by_lightning,
        "accelerate": by_accelerate,
        "trainer": functools.partial(by_trainer, folder=tmp_path),
        "opacus": by_opacus,
    }
    found = trained(loops[library])
    np.testing.assert_allclose(found, trained(plain), rtol=1e-4, atol=1e-5)
    assert np.abs(found - 1.0).max() > 0.5


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Secure RNG turned off:UserWarning")
@pytest.mark.filterwarnings("ignore:Full backward hook is firing:UserWarning")
def test_opacus_clips_the_samples_and_not_the_terms() -> None:
    found = trained(functools.partial(by_opacus, clip=0.3))
    wanted = trained(functools.partial(plain, clip=0.3))
    np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-5)
