"""Where each registered tensor will lie: units of tensors that share bytes, packed into slabs.

A unit is what moves as one piece: all registered tensors whose byte ranges in one storage touch each other. Tied
tensors and views of one buffer so stay what they are; a slice of a large loader's buffer takes only its own bytes.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

from tidemill.contracts.footprint import Part
from tidemill.errors import ResidencyError
from tidemill.residency.ledger import NO_SLAB, Entry

__all__ = ["Registered", "SlabPlan", "plan_slabs"]

# Offsets of units in a slab: what CUDA's own allocator guarantees, and any dtype's alignment.
_ALIGNMENT = 512
# Start of a unit within its old storage is rounded down to this, so that views of wider dtypes stay aligned.
_VIEW_ALIGNMENT = 16


@dataclass(frozen=True, kw_only=True, eq=False)
class Registered:
    """A tensor given to a saver. `aliases` are other tensor objects for exactly the same elements.

    With `whole`, it is the piece at `offset` of a tensor of that shape. `buffer` is what it was cut from at the start
    and must stay in.
    """

    name: str
    tensor: torch.Tensor
    part: Part
    aliases: tuple[torch.Tensor, ...] = ()
    buffer: torch.Tensor | None = None
    whole: tuple[int, ...] | None = None
    offset: tuple[int, ...] | None = None

    @property
    def byte_range(self) -> tuple[int, int]:
        """First byte and one past the last byte in its storage; its stride may leave gaps between them."""
        tensor = self.tensor
        start = int(tensor.storage_offset()) * tensor.element_size()
        last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
        return start, start + (last + 1) * tensor.element_size()


@dataclass(frozen=True, kw_only=True, eq=False)
class SlabPlan:
    """One slab to be: its part, its size in bytes and what will lie in it, with the tensors to move."""

    part: Part
    bytes: int
    members: tuple[tuple[Registered, Entry], ...]


@dataclass(frozen=True, kw_only=True, eq=False)
class _Unit:
    part: Part
    start: int
    bytes: int
    members: tuple[Registered, ...]


def plan_slabs(registered: Sequence[Registered], *, page_bytes: int) -> tuple[list[SlabPlan], list[Entry]]:
    """The slabs, and all entries in the order of registration, those without elements included.

    A slab holds one part and at most `page_bytes`, unless a single unit is larger.
    """
    empty = [_entry(item, NO_SLAB, 0) for item in registered if item.tensor.numel() == 0]
    units = _units(item for item in registered if item.tensor.numel() > 0)
    plans: list[SlabPlan] = []
    for part in dict.fromkeys(unit.part for unit in units):
        for group in _fill([unit for unit in units if unit.part == part], page_bytes):
            plans.append(_plan(part, group, len(plans)))
    by_name = {entry.name: entry for plan in plans for _, entry in plan.members} | {
        entry.name: entry for entry in empty
    }
    return plans, [by_name[item.name] for item in registered]


def _units(registered: Iterable[Registered]) -> list[_Unit]:
    by_storage: dict[int, list[Registered]] = {}
    for item in registered:
        by_storage.setdefault(item.tensor.untyped_storage().data_ptr(), []).append(item)
    units = []
    for items in by_storage.values():
        for group in _touching(items):
            part = _one_part(group)
            start = min(item.byte_range[0] for item in group) // _VIEW_ALIGNMENT * _VIEW_ALIGNMENT
            end = max(item.byte_range[1] for item in group)
            units.append(_Unit(part=part, start=start, bytes=end - start, members=tuple(group)))
    return units


def _one_part(group: Sequence[Registered]) -> Part:
    first = group[0]
    for item in group[1:]:
        if item.part != first.part:
            raise ResidencyError(
                f"cannot keep {first.name!r} as {first.part.words()} and {item.name!r} as {item.part.words()}: they "
                "share memory, which can only sleep as one; register both under one part"
            )
    return first.part


def _touching(items: list[Registered]) -> list[list[Registered]]:
    groups: list[list[Registered]] = []
    end = -1
    for item in sorted(items, key=lambda item: item.byte_range):
        if groups and item.byte_range[0] < end:
            groups[-1].append(item)
        else:
            groups.append([item])
        end = max(end, item.byte_range[1])
    return groups


def _fill(units: list[_Unit], page_bytes: int) -> list[list[_Unit]]:
    groups: list[list[_Unit]] = []
    used = page_bytes
    for unit in units:
        if used + unit.bytes > page_bytes:
            groups.append([])
            used = 0
        groups[-1].append(unit)
        used += _aligned(unit.bytes)
    return groups


def _plan(part: Part, units: list[_Unit], slab: int) -> SlabPlan:
    members, offset = [], 0
    for unit in units:
        for item in unit.members:
            members.append((item, _entry(item, slab, offset + item.byte_range[0] - unit.start)))
        offset += _aligned(unit.bytes)
    return SlabPlan(part=part, bytes=offset, members=tuple(members))


def _entry(item: Registered, slab: int, offset: int) -> Entry:
    tensor = item.tensor
    return Entry(
        name=item.name,
        part=item.part,
        dtype=tensor.dtype,
        shape=tuple(tensor.shape),
        stride=tensor.stride(),
        slab=slab,
        offset=offset,
        whole=item.whole,
        offset_in_whole=item.offset,
    )


def _aligned(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT
