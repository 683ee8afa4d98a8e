"""Device memory that we own: flat byte tensors into which registered tensors are moved once."""

from collections.abc import Sequence

import torch

from tidemill.contracts.footprint import Part
from tidemill.errors import ResidencyError
from tidemill.residency.ledger import Entry
from tidemill.residency.packing import Registered, SlabPlan, plan_slabs

__all__ = ["Slab", "build_slabs"]


class Slab:
    """One piece of device memory. Its storage object lives as long as the slab; the bytes behind it come and go."""

    def __init__(self, *, part: Part, size: int, device: torch.device) -> None:
        self.part = part
        self.bytes = size
        self.memory = torch.empty(size, dtype=torch.uint8, device=device)

    @property
    def resident(self) -> bool:
        """Whether the bytes are on the device."""
        return self.memory.untyped_storage().nbytes() > 0

    def check_can_empty(self) -> None:
        """Raises ResidencyError when the memory is lent to somebody who would be left with a dangling pointer."""
        if not self.memory.untyped_storage().resizable():
            raise ResidencyError(
                f"cannot release {self.part.words()}: a numpy array made by `tensor.numpy()` shares its memory; "
                "make it from a copy instead: `tensor.detach().clone().numpy()`"
            )

    def empty(self) -> None:
        """Give the bytes back to the allocator. Every tensor in the slab stays an object without memory."""
        self.memory.untyped_storage().resize_(0)

    def allocate(self) -> None:
        """Get bytes again, of any contents."""
        self.memory.untyped_storage().resize_(self.bytes)


def build_slabs(
    registered: Sequence[Registered], *, bases: Sequence[Registered], page_bytes: int, device: torch.device
) -> tuple[list[Slab], list[Entry]]:
    """Move every registered tensor into new slabs, and `bases`, which get no entry.

    Old storages are freed one slab after the other.
    """
    moving = [*registered, *bases]
    plans, entries = plan_slabs(moving, page_bytes=page_bytes)
    slabs = [_move(plan, device) for plan in plans]
    for item in moving:
        if item.tensor.numel() == 0:
            _repoint(item, _nothing(item, device))
    return slabs, entries[: len(registered)]


def _nothing(item: Registered, device: torch.device) -> torch.Tensor:
    # Even a tensor without elements may keep a large storage alive; and FSDP2 looks in which storage it lies.
    if item.buffer is None:
        return torch.empty(item.tensor.shape, dtype=item.tensor.dtype, device=device)
    return item.buffer[:0].view(item.tensor.shape)


def _move(plan: SlabPlan, device: torch.device) -> Slab:
    slab = Slab(part=plan.part, size=plan.bytes, device=device)
    views = [(item, entry.view(slab.memory)) for item, entry in plan.members]
    for item, view in views:
        view.copy_(item.tensor.detach())
    for item, view in views:
        _repoint(item, view)
    return slab


def _repoint(item: Registered, view: torch.Tensor) -> None:
    # `.data` keeps the tensor object, and with it the optimizer's key, hooks and the autograd accumulator.
    for tensor in (item.tensor, *item.aliases):
        tensor.data = view
