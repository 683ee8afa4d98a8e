"""What a rank holds of whole tensors: FSDP2 cuts parameters along the first dimension, in the ranks' order.

Every rank but the last ones has the same number of rows; those at the end may have fewer, or none.
"""

from collections.abc import Mapping

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from tidemill.contracts.checkpoint import SavedTensor
from tidemill.errors import CheckpointError
from tidemill.residency.ledger import Entry, Ledger
from tidemill.residency.sharded import box_of

__all__ = ["boxes", "local", "whole_and_offset"]


@torch.no_grad()
def local(tensor: Tensor) -> Tensor:
    """The plain tensor of this rank's elements, not a copy; of a plain tensor itself."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def whole_and_offset(tensor: Tensor) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Shape of the whole, and where this rank's elements begin. Needs no process group."""
    return box_of(tensor) if isinstance(tensor, DTensor) else (tuple(tensor.shape), (0,) * tensor.ndim)


def boxes(ledger: Ledger, tensors: Mapping[str, SavedTensor]) -> dict[str, SavedTensor]:
    """Of whole saved tensors what this rank's ledger holds; nothing is read yet. Other names are left as they are.

    Raises CheckpointError for a tensor that was saved of another shape.
    """
    found = dict(tensors)
    for entry in ledger:
        if entry.whole is None or entry.name not in tensors:
            continue
        saved = tensors[entry.name]
        if saved.shape != entry.whole:
            raise CheckpointError(
                f"cannot load {entry.name!r}: saved as {saved.dtype} {list(saved.shape)}, here it is "
                f"{entry.dtype_name} {list(entry.whole)}; the checkpoint is of another model or dtype"
            )
        found[entry.name] = _Box(saved, entry)
    return found


class _Box:
    """Implements `SavedTensor`: what an entry holds of one, read when it is asked for."""

    def __init__(self, saved: SavedTensor, entry: Entry) -> None:
        self._saved = saved
        self._offset = entry.offset_in_whole or ()
        self._shape = entry.shape

    @property
    def dtype(self) -> str:
        return self._saved.dtype

    @property
    def shape(self) -> tuple[int, ...]:
        return self._shape

    @property
    def data(self) -> memoryview:
        return self.read((0,) * len(self._shape), self._shape)

    def read(self, offset: tuple[int, ...], shape: tuple[int, ...]) -> memoryview:
        if 0 in shape:
            # A rank without rows begins past the end.
            return memoryview(b"")
        within = tuple(mine + theirs for mine, theirs in zip(self._offset, offset, strict=True))
        return self._saved.read(within, shape)
