"""The size of a gradient, and what to do about it. Own code, because torch's refuses some mixes of sharded tensors."""

import math
from collections.abc import Sequence

import torch
from jaxtyping import Float64
from torch import Tensor

from tidemill.errors import TrainerError

__all__ = ["NORM_ELEMENTS", "drop", "finish", "norm_of", "taken"]

NORM_ELEMENTS = 1 << 24
"""Elements whose norm is taken at once: they are copied to float64 for it, 128 MiB."""


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


def norm_of(gradients: Sequence[Tensor]) -> Float64[Tensor, ""]:
    """L2 norm over all gradients as one vector, in float64; not finite if and only if an element is not."""
    pieces = [piece for gradient in gradients for piece in torch.split(gradient.reshape(-1), NORM_ELEMENTS)]
    norms = [torch.linalg.vector_norm(piece, dtype=torch.float64) for piece in pieces]
    norm: Tensor = torch.linalg.vector_norm(torch.stack(norms))
    return norm


def finish(gradients: Sequence[Tensor], *, norm: float, count: float, max_norm: float) -> float:
    """`norm` divided by `count`, as the gradients then are, in place; and clipped, so that it is at most `max_norm`.

    `norm` is that of the summed gradients of all ranks, of which these may be a part. One that is not finite leaves
    them as they are: the caller must not apply them.
    """
    mean = norm / count
    if math.isfinite(mean):
        torch._foreach_mul_(list(gradients), min(1.0, max_norm / max(mean, 1e-12)) / count)
    return mean
