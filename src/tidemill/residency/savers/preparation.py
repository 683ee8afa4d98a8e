"""From registered tensors to slabs, with host pages for all of them."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from tidemill.errors import ResidencyError
from tidemill.residency.arena import Arena, Claims, claims_of
from tidemill.residency.device_memory import MakeDeviceMemory, ResizedStorage
from tidemill.residency.host_memory import FreeBytes, MapMemory, map_plain
from tidemill.residency.leaks import own
from tidemill.residency.ledger import NO_SLAB, Ledger
from tidemill.residency.packing import plan_slabs
from tidemill.residency.pages import PagePlan, plan_pages
from tidemill.residency.registration import Registration
from tidemill.residency.savers.crossing import Crossing
from tidemill.residency.slabs import build_slabs
from tidemill.residency.transfer import Transfer
from tidemill.units import format_bytes

__all__ = ["Kept", "Preparation", "nothing_kept"]

# Of a page's size: so that an element of any dtype lies on one page.
_PAGE_ALIGNMENT = 512


@dataclass(frozen=True, kw_only=True, eq=False)
class Kept:
    """What a saver keeps: entries, the pages that each lies on, and slabs with pages."""

    ledger: Ledger
    claims: Claims
    arena: Arena
    crossing: Crossing


def nothing_kept(transfer: Transfer) -> Kept:
    """For a saver that has nothing yet."""
    arena = Arena(plan_pages((), page_bytes=1, spare_bytes=0), map_plain)
    crossing = Crossing((), arena, transfer, seconds=0.0)
    return Kept(ledger=Ledger(()), claims=Claims(places={}, readers={}), arena=arena, crossing=crossing)


@dataclass(frozen=True, kw_only=True)
class Preparation:
    """How slabs and pages are made: see HostArenaSaver."""

    device: torch.device
    page_bytes: int
    spare_bytes: int | None
    deadline: float
    map_memory: MapMemory
    make_memory: MakeDeviceMemory
    free_host_bytes: FreeBytes

    def keep(self, registration: Registration, transfer: Transfer) -> Kept:
        """Get the host pages, then move every registered tensor into slabs; old storages are freed meanwhile.

        Raises ResidencyError, before anything moves, when the host has no room for the pages.
        """
        items = registration.items()
        moving = [*items, *registration.bases()]
        page_bytes = -(-self.page_bytes // _PAGE_ALIGNMENT) * _PAGE_ALIGNMENT
        plans, entries = plan_slabs(moving, page_bytes=page_bytes)
        sizes = [plan.bytes for plan in plans]
        pages = plan_pages(sizes, page_bytes=page_bytes, spare_bytes=self.spare_bytes)
        self._check_room(pages, state=sum(sizes))
        arena = Arena(pages, self.map_memory)

        def make_room(sizes: Sequence[int]) -> None:
            if self.make_memory is ResizedStorage:
                transfer.give_back()
                transfer.reserve(sizes)

        slabs = build_slabs(plans, moving, make_memory=self.make_memory, device=self.device, make_room=make_room)
        ledger = Ledger(tuple(entries[: len(items)]))
        ranges = {entry.name: (entry.slab, entry.offset, entry.end) for entry in ledger if entry.slab != NO_SLAB}
        crossing = Crossing(slabs, arena, transfer, seconds=self.deadline)
        own(crossing)
        claims = claims_of(ranges, page_bytes=page_bytes)
        return Kept(ledger=ledger, claims=claims, arena=arena, crossing=crossing)

    def _check_room(self, pages: PagePlan, *, state: int) -> None:
        there = self.free_host_bytes()
        if there is not None and pages.bytes > there:
            raise ResidencyError(
                f"cannot keep on the host what sleeps: {format_bytes(pages.bytes)} are needed ({pages.bytes} bytes: "
                f"{format_bytes(state)} of state, the rest is spare pages and alignment), and {format_bytes(there)} "
                f"({there} bytes) are there; free host memory, raise its limit, lower residency.spare, or use more "
                "ranks on other hosts"
            )
