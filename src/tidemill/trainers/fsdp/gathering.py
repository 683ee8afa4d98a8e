"""One collective under the two names that torch has for it."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

__all__ = ["all_gathered"]

# Torch 2.13 has the first and warns of the second, which is all that 2.11 has.
_NAMES = ("all_gather_single", "all_gather_into_tensor")
_all_gather: Any = next(vars(dist)[name] for name in _NAMES if name in vars(dist))


def all_gathered(own: Tensor, *, count: int, group: dist.ProcessGroup | None = None) -> Tensor:
    """The equally long flat tensors of `count` ranks, one a row, new; of the whole world unless `group` is given."""
    found = torch.empty((count, len(own)), dtype=own.dtype, device=own.device)
    _all_gather(found.view(-1), own, group=group)
    return found
