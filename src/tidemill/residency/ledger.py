"""What must survive sleep: every tensor by name, where it lies, and how it is shaped.

Device memory is divided into slabs; an entry lies in one slab. Entries may overlap (views of one buffer).
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property

import torch

from tidemill.contracts.checkpoint import TensorSpec
from tidemill.contracts.footprint import Part
from tidemill.errors import ResidencyError
from tidemill.residency.dtypes import dtype_name

__all__ = ["NO_SLAB", "Entry", "Ledger"]

NO_SLAB = -1


@dataclass(frozen=True, kw_only=True)
class Entry:
    """One tensor. `offset` is in bytes from the start of slab number `slab`, `stride` in elements.

    A tensor without elements lies nowhere: its slab is NO_SLAB. With `whole`, the tensor is the piece at
    `offset_in_whole` of one of that shape. What follows from all this is found out once: saves ask for it again.
    """

    name: str
    part: Part
    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    slab: int
    offset: int
    whole: tuple[int, ...] | None = None
    offset_in_whole: tuple[int, ...] | None = None

    @property
    def dtype_name(self) -> str:
        """As in a safetensors file."""
        return dtype_name(self.dtype)

    @cached_property
    def elements(self) -> int:
        """Number of elements."""
        return torch.Size(self.shape).numel()

    @cached_property
    def bytes(self) -> int:
        """Bytes of the elements, row-major and without gaps."""
        return self.elements * self.dtype.itemsize

    @cached_property
    def end(self) -> int:
        """One past its last byte in the slab; strides may leave gaps before it."""
        if self.elements == 0:
            return self.offset
        last = sum((size - 1) * stride for size, stride in zip(self.shape, self.stride, strict=True))
        return self.offset + (last + 1) * self.dtype.itemsize

    @cached_property
    def spec(self) -> TensorSpec:
        """What it is a piece of, for a file."""
        return TensorSpec(
            dtype=self.dtype_name,
            shape=self.shape,
            whole=self.shape if self.whole is None else self.whole,
            offset=(0,) * len(self.shape) if self.offset_in_whole is None else self.offset_in_whole,
        )

    @cached_property
    def row_major(self) -> bool:
        """Whether the elements lie row-major and without gaps, so that a slice of the slab is the tensor."""
        expected = 1
        for size, stride in zip(reversed(self.shape), reversed(self.stride), strict=True):
            if size != 1 and stride != expected:
                return False
            expected *= size
        return True

    def view(self, slab: torch.Tensor) -> torch.Tensor:
        """The tensor as a view of `slab`, a flat uint8 tensor that starts at the beginning of its storage or not.

        It shares the slab's storage, so it stays right when that storage is emptied and filled again.
        """
        start = (slab.storage_offset() + self.offset) // self.dtype.itemsize
        tensor = torch.empty(0, dtype=self.dtype, device=slab.device)
        return tensor.set_(slab.untyped_storage(), start, self.shape, self.stride)


@dataclass(frozen=True)
class Ledger:
    """All entries of a tenant on one rank, fixed once its memory is frozen."""

    entries: tuple[Entry, ...]

    def __iter__(self) -> Iterator[Entry]:
        return iter(self.entries)

    def __len__(self) -> int:
        return len(self.entries)

    @cached_property
    def by_name(self) -> Mapping[str, Entry]:
        """All entries, in the same order."""
        return {entry.name: entry for entry in self.entries}

    def names(self) -> set[str]:
        """The names of all entries."""
        return set(self.by_name)

    def check_covers(self, names: Iterable[str]) -> None:
        """Raises ResidencyError unless the entries are exactly `names`: state born later would not survive sleep."""
        wanted, held = set(names), self.names()
        missing, unexpected = sorted(wanted - held), sorted(held - wanted)
        if missing or unexpected:
            raise ResidencyError(
                f"the ledger does not cover the state: {len(missing)} tensors are not in it {missing[:5]}, "
                f"{len(unexpected)} in it exist no more {unexpected[:5]}; register every tensor before `freeze`, "
                "optimizer state included"
            )
