"""What sleeps: device memory of the shapes that trainers have.

`large`: bfloat16 tensors of 64 MiB. `small`: 10,000 tensors of 256 bytes to 4 MiB, log-uniform. `flat`: as Megatron
lays out a rank, one flat buffer of which bfloat16 and float32 parameters are views, flat float32 masters and moments.
`fsdp`: float32 parameters and two moments each of a Qwen3 shape, cut over the ranks.
"""

import math
import random
from dataclasses import dataclass, field

import torch

from benchmarks.shapes import parameter_shapes
from tidemill.units import MIB
from tidemill.weights.checksum import checksum

__all__ = ["Case", "Memory", "fingerprint", "make"]

_SMALL_TENSORS = 10_000
_HASHED_AT_ONCE = 256 * MIB
# Of bytes that a parameter takes in the case `flat`: itself, its master, two moments.
_FLAT_BYTES = 14


@dataclass(frozen=True, kw_only=True)
class Case:
    """What is to be made: `size` in bytes for all but `fsdp`, which has its `shape`; of `rank` out of `ranks`."""

    name: str
    size: int
    shape: str
    device: str
    rank: int = 0
    ranks: int = 1


@dataclass(frozen=True)
class Memory:
    """Tensors that hold each live byte once, and views into them."""

    tensors: list[torch.Tensor]
    views: list[torch.Tensor] = field(default_factory=list)

    @property
    def bytes(self) -> int:
        """Live bytes."""
        return sum(tensor.nbytes for tensor in self.tensors)

    def change(self) -> None:
        """Make all contents other than they were."""
        torch._foreach_add_(self.tensors, 1)

    def views_are_views(self) -> bool:
        """Whether every view lies in the memory of the first tensor still."""
        home = self.tensors[0].untyped_storage().data_ptr()
        return all(view.untyped_storage().data_ptr() == home for view in self.views)


def fingerprint(tensors: list[torch.Tensor]) -> list[int]:
    """Checksums of all bytes, computed where they lie, of many small tensors at once."""
    found: list[int] = []
    pending: list[torch.Tensor] = []
    size = 0
    for tensor in tensors:
        if pending and size + tensor.nbytes > _HASHED_AT_ONCE:
            found.append(checksum(torch.cat(pending)))
            pending, size = [], 0
        pending.append(tensor.detach().contiguous().view(-1).view(torch.uint8))
        size += tensor.nbytes
    return [*found, checksum(torch.cat(pending))] if pending else found


def make(case: Case) -> Memory:
    """The memory on the device, with random contents. Nothing else is allocated on the way that is not freed."""
    torch.manual_seed(case.rank)
    match case.name:
        case "large":
            count = max(1, case.size // (64 * MIB))
            return Memory([_filled(case.size // count // 2, torch.bfloat16, case.device) for _ in range(count)])
        case "small":
            return Memory([_filled(size, torch.uint8, case.device) for size in _small_sizes(case.size)])
        case "flat":
            return _flat(case)
        case "fsdp":
            sizes = [math.prod((-(-shape[0] // case.ranks), *shape[1:])) for shape in parameter_shapes(case.shape)]
            return Memory([_filled(size, torch.float32, case.device) for size in sizes for _ in range(3)])
    raise ValueError(f"there is no case {case.name!r}")


def _filled(elements: int, dtype: torch.dtype, device: str) -> torch.Tensor:
    """In place: where tensors are made in a region of a memory saver, whatever else is made stays there too."""
    tensor = torch.empty(elements, dtype=dtype, device=device)
    return tensor.random_(0, 256) if dtype == torch.uint8 else tensor.normal_()


def _small_sizes(total: int) -> list[int]:
    """Bytes of each: log-uniform, scaled so that together they are `total`."""
    dice = random.Random(0)
    sizes = [2 ** dice.uniform(8, 22) for _ in range(_SMALL_TENSORS)]
    scale = total / sum(sizes)
    return [max(1, int(size * scale)) for size in sizes]


def _flat(case: Case) -> Memory:
    layers, parts = 16, (4, 2, 1, 1)
    unit = max(2, case.size // _FLAT_BYTES // (layers * sum(parts)) // 2 * 2)
    count = unit * layers * sum(parts)
    buffer = _filled(count // 2, torch.float32, case.device)
    halves, views, start = buffer.view(torch.bfloat16), [], 0
    for number, part in enumerate(parts * layers):
        piece = halves[start : start + part * unit]
        # A few parameters stay float32, as norms and routers do; they take half as many elements.
        views.append(piece.view(torch.float32) if number % 4 == 3 else piece)
        start += part * unit
    return Memory([buffer, *(_filled(count, torch.float32, case.device) for _ in range(3))], views)
