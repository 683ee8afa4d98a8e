"""Whether a ledger covers the state: the same names, and each tensor where its entry says, and shaped so.

A tensor that was exchanged for another of its name (an optimizer that makes its moments anew, a parameter that was set)
would be neither saved nor brought back: training would go on with old contents, in silence. One that is another view of
the same bytes (transposed, of another dtype) would be saved as what it is no more.
"""

from collections.abc import Mapping, Sequence

import torch
from torch.distributed.tensor import DTensor

from tidemill.errors import ResidencyError
from tidemill.residency.ledger import NO_SLAB, Entry, Ledger

__all__ = ["check_covers"]


def check_covers(ledger: Ledger, slabs: Sequence[torch.Tensor], state: Mapping[str, torch.Tensor]) -> None:
    """Raises ResidencyError unless `state`, by name, is what the ledger's entries say of `slabs`, flat and uint8."""
    ledger.check_covers(state)
    strange = [entry.name for entry in ledger if not _lies_in(_local(state[entry.name]), entry, slabs)]
    if strange:
        raise ResidencyError(
            f"the ledger does not cover the state: {len(strange)} tensors are others than those registered under their "
            f"names {strange[:5]}, and would not survive sleep; change tensors in place (`copy_`), and never put "
            "another in their stead"
        )


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def _lies_in(tensor: torch.Tensor, entry: Entry, slabs: Sequence[torch.Tensor]) -> bool:
    if entry.slab == NO_SLAB:
        return tensor.numel() == 0 and tensor.dtype == entry.dtype
    flat = slabs[entry.slab]
    # The object behind a storage is the same awake and asleep; its address need not be.
    return (
        tensor.untyped_storage()._cdata == flat.untyped_storage()._cdata
        and int(tensor.storage_offset()) * tensor.element_size() == entry.offset
        and tensor.dtype == entry.dtype
        and tuple(tensor.shape) == entry.shape
        and _steps(tensor.shape, tensor.stride()) == _steps(entry.shape, entry.stride)
    )


def _steps(shape: Sequence[int], stride: Sequence[int]) -> list[int]:
    """Strides along which there is more than one element: others say nothing."""
    return [step for size, step in zip(shape, stride, strict=True) if size > 1]
