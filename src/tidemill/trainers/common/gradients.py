"""The size of a gradient, and what to do about it. Own code, because torch's refuses some mixes of sharded tensors."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from tidemill.errors import TrainerError

__all__ = ["drop", "finish", "global_norm", "taken"]


def taken(parameters: Sequence[Tensor]) -> list[Tensor]:
    """The gradients that backward left. Raises TrainerError when a parameter has none: it would silently not learn."""
    found = [parameter.grad for parameter in parameters if parameter.grad is not None]
    if len(found) != len(parameters):
        raise TrainerError(
            f"cannot update: {len(parameters) - len(found)} of {len(parameters)} parameters got no gradient; every "
            "parameter of the model must take part in its forward pass"
        )
    return found


def drop(parameters: Sequence[Tensor]) -> None:
    """Give the memory of gradients back."""
    for parameter in parameters:
        parameter.grad = None


def global_norm(gradients: Sequence[Tensor]) -> float:
    """L2 norm over all gradients as one vector, in float64; not finite if and only if an element is not."""
    norms = [torch.linalg.vector_norm(gradient, dtype=torch.float64) for gradient in gradients]
    return float(torch.linalg.vector_norm(torch.stack(norms)).item())


def finish(gradients: Sequence[Tensor], *, count: float, max_norm: float) -> float:
    """The norm of summed gradients divided by `count`. Divides them and clips them to `max_norm`, in place.

    A norm that is not finite leaves the gradients as they are: the caller must not apply them.
    """
    norm = global_norm(gradients) / count
    if math.isfinite(norm):
        torch._foreach_mul_(list(gradients), min(1.0, max_norm / max(norm, 1e-12)) / count)
    return norm
