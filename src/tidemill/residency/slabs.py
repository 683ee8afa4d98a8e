"""Device memory that we own: flat byte tensors into which registered tensors are moved once."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from tidemill.contracts.footprint import Part
from tidemill.residency.device_memory import DeviceMemory, MakeDeviceMemory
from tidemill.residency.packing import Registered, SlabPlan
from tidemill.residency.transfer import in_blocks

__all__ = ["Slab", "build_slabs"]


@dataclass(frozen=True, kw_only=True, eq=False)
class Slab:
    """One piece of device memory, of which `bytes` are used. It lives on; the bytes behind it come and go."""

    part: Part
    bytes: int
    memory: DeviceMemory


def build_slabs(
    plans: Sequence[SlabPlan],
    moving: Sequence[Registered],
    *,
    make_memory: MakeDeviceMemory,
    device: torch.device,
    make_room: Callable[[Sequence[int]], None],
) -> list[Slab]:
    """Move every tensor in `moving`, for which the plans were made, into new slabs.

    Old storages are freed one slab after the other. `make_room` is told the bytes of the next few slabs before they
    are made.
    """
    slabs: list[Slab] = []
    for few in in_blocks(plans, lambda plan: plan.bytes):
        make_room([plan.bytes for plan in few])
        slabs += [_move(plan, make_memory, device) for plan in few]
    for item in moving:
        if item.tensor.numel() == 0:
            _repoint(item, _nothing(item, device))
    return slabs


def _nothing(item: Registered, device: torch.device) -> torch.Tensor:
    # Even a tensor without elements may keep a large storage alive; and FSDP2 looks in which storage it lies.
    if item.buffer is None:
        return torch.empty(item.tensor.shape, dtype=item.tensor.dtype, device=device)
    return item.buffer[:0].view(item.tensor.shape)


def _move(plan: SlabPlan, make_memory: MakeDeviceMemory, device: torch.device) -> Slab:
    memory = make_memory(plan.bytes, device)
    views = [(item, entry.view(memory.flat)) for item, entry in plan.members]
    for item, view in views:
        view.copy_(item.tensor.detach())
    for item, view in views:
        _repoint(item, view)
    return Slab(part=plan.part, bytes=plan.bytes, memory=memory)


def _repoint(item: Registered, view: torch.Tensor) -> None:
    # `.data` keeps the tensor object, and with it the optimizer's key, hooks and the autograd accumulator.
    for tensor in (item.tensor, *item.aliases):
        tensor.data = view
