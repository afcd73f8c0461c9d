"""The likeliest mistakes in data and models, each told in one sentence that names the remedy.

PyTorch finds them deep in a layer or a loss, and names neither inputs nor targets.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn
from torch.nn import functional

from fl_strategies.core.schedules import require

CHANNELS = (1, 3, 4)
"""Of images: grey, red-green-blue, and with transparency."""
OF_NUMBERS = (
    functional.mse_loss,
    functional.l1_loss,
    functional.smooth_l1_loss,
    functional.huber_loss,
    functional.binary_cross_entropy,
    functional.binary_cross_entropy_with_logits,
)
MODULES_OF_NUMBERS = (
    nn.MSELoss,
    nn.L1Loss,
    nn.SmoothL1Loss,
    nn.HuberLoss,
    nn.BCELoss,
    nn.BCEWithLogitsLoss,
)
"""PyTorch's losses that compare targets with outputs: targets are no classes."""


def check_module(module: object) -> None:
    """Raise ``ValueError`` unless ``module`` is a module whose arrays have their own names."""
    require(isinstance(module, nn.Module), "module", "a torch.nn.Module", module)
    if hasattr(module, "_orig_mod"):
        raise ValueError(
            "module must be the module itself, not what torch.compile returned, whose arrays have"
            " other names: module.compile() compiles it in place"
        )


def in_inputs(inputs: Any, error: Exception) -> str:
    """Return the mistake in ``inputs`` that made a module raise ``error``; "" for another one."""
    if not isinstance(inputs, Tensor):
        return ""
    shape, text = [*inputs.shape], str(error)
    if not inputs.is_floating_point() and "long" in text.lower():
        return (
            f"inputs have type {_type(inputs)}, and the module takes floating-point numbers: give"
            " it those, of images inputs / 255"
        )
    if "channels, but got" in text and len(shape) == 3:
        return f"inputs have shape {shape}, and lack the dimension of channels: inputs[:, None]"
    if "channels, but got" in text and len(shape) == 4 and shape[3] in CHANNELS:
        return (
            f"inputs have shape {shape}, and images [samples, channels, height, width]:"
            " inputs.permute(0, 3, 1, 2), or transpose(0, 3, 1, 2) of a NumPy array"
        )
    return ""


def in_targets(outputs: Any, targets: Tensor) -> str:
    """Return the mistake in ``targets`` that made a loss fail; "" for another one."""
    if not isinstance(outputs, Tensor):
        return (
            f"the model returns a {type(outputs).__name__}, which the loss does not take: a loss"
            " such as lambda outputs, targets: ... reads it"
        )
    shapes = f"targets have shape {[*targets.shape]}, and the model's outputs {[*outputs.shape]}"
    if outputs.dim() == 0 or len(outputs) != len(targets):
        return f"{shapes}: they must be of as many samples"
    classes = outputs.shape[1] if outputs.dim() > 1 else 0
    if classes > 1 and outputs.dim() == 2 and targets.shape[1:] == (1,):
        return f"{shapes}: classes have shape [{len(targets)}], by targets.reshape(-1)"
    if classes == 0 or targets.dim() != outputs.dim() - 1:
        return ""
    if targets.is_floating_point():
        return f"targets have type {_type(targets)}, and classes are integers: targets as int64"
    if targets.device.type == "cpu" and not 0 <= int(targets.min()) <= int(targets.max()) < classes:
        return (
            f"targets are {int(targets.min())} to {int(targets.max())}, and the model has {classes}"
            f" outputs, for the classes 0 to {classes - 1}"
        )
    return ""


def of_numbers(loss: object) -> bool:
    """Return whether the loss is one of PyTorch's that compare targets with outputs."""
    return isinstance(loss, MODULES_OF_NUMBERS) or any(one is loss for one in OF_NUMBERS)


def in_shapes(outputs: Any, targets: Tensor, loss: object) -> str:
    """Return the mistake in ``targets`` that a loss would not notice; "" for none."""
    if not isinstance(outputs, Tensor) or outputs.shape == targets.shape or not of_numbers(loss):
        return ""
    shapes = f"targets have shape {[*targets.shape]}, and the model's outputs {[*outputs.shape]}"
    if outputs.numel() != targets.numel():
        return f"{shapes}: they must have one shape"
    return f"{shapes}: targets.reshape({', '.join(map(str, (-1, *outputs.shape[1:])))})"


def in_loss(loss: Any, *, trains: bool) -> str:
    """Return what is wrong with what a loss returned; "" for nothing."""
    if not isinstance(loss, Tensor):
        got = f"a {type(loss).__name__}"
    elif loss.dim() > 0:
        got = f"shape {[*loss.shape]}, as reduction='none' returns"
    elif trains and not loss.requires_grad:
        got = "one without a gradient: detach(), item() or argmax() cuts it off"
    else:
        return ""
    return f"loss must return one number, a scalar tensor with a gradient, got {got}"


def in_numbers(inputs: Any, targets: Tensor) -> str:
    """Return in how many samples there are numbers that are not finite; "" for none."""
    several = inputs.values() if isinstance(inputs, Mapping) else inputs
    tensors = [inputs] if isinstance(inputs, Tensor) else [*several]
    for name, value in [*(("inputs", tensor) for tensor in tensors), ("targets", targets)]:
        bad = int((~value.isfinite()).reshape(len(value), -1).any(1).sum())
        if bad:
            return f"{name} have NaN or infinity in {bad} of {len(value)} samples"
    return ""


def _type(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")
