"""Host memory that holds what sleeps: pages, and the table that says which of them hold which slab.

All pages lie in one mapping, allocated, touched and registered once: pinned memory allocated in each sleep is what
makes others run at a tenth of the bus. A page that a snapshot references is never written; a spare page takes its place
(copy-on-write) until the slab can go home again. When no spare page is left, whoever writes waits for a reader to let
go of a single page.
"""

import math
import threading
import time
import weakref
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch

from tidemill.errors import ResidencyError
from tidemill.faults import skipped
from tidemill.residency.host_memory import MapMemory
from tidemill.residency.pages import Page, PagePlan, PageRun
from tidemill.units import format_bytes, format_seconds

__all__ = ["Arena", "Claims", "Place", "Reading", "claims_of"]

Place = tuple[int, int]
"""Number of a slab, and of a page in it."""


@dataclass(frozen=True, kw_only=True)
class Claims:
    """Which places each tensor lies on, by name, and how many tensors lie on each place."""

    places: Mapping[str, tuple[Place, ...]]
    readers: Mapping[Place, int]


def claims_of(ranges: Mapping[str, tuple[int, int, int]], *, page_bytes: int) -> Claims:
    """`ranges` are slab, first byte and one past the last byte of each tensor; one without bytes is not among them."""
    places = {
        name: tuple((slab, number) for number in range(start // page_bytes, (end - 1) // page_bytes + 1))
        for name, (slab, start, end) in ranges.items()
    }
    readers: dict[Place, int] = {}
    for places_of_one in places.values():
        for place in places_of_one:
            readers[place] = readers.get(place, 0) + 1
    return Claims(places=places, readers=readers)


class Arena:
    """Every slab has pages of its own, where its bytes are unless a reader was in the way."""

    def __init__(self, plan: PagePlan, map_memory: MapMemory) -> None:
        """Raises what `map_memory` raises."""
        self._plan = plan
        self._memory, self._view = torch.empty(0, dtype=torch.uint8), memoryview(b"")
        # A finalizer runs once, at the latest when the arena or the process ends: pinned memory is never just dropped.
        self._unmap = weakref.finalize(self, _nothing)
        if plan.bytes:
            memory, unmap = map_memory(plan.bytes)
            self._unmap = weakref.finalize(self, unmap)
            self._memory, self._view = torch.frombuffer(memory, dtype=torch.uint8), memoryview(memory)
        self._table = [list(pages) for pages in plan.home]
        self._free = list(plan.spares)
        self._readings: list[Reading] = []
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        # When a reader last let go of something; monotonic.
        self._progressed = -math.inf

    def run(self, slab: int) -> PageRun:
        """The slab's pages as they are now."""
        pages = self._table[slab]
        size = sum(page.bytes for page in self._plan.home[slab])
        return PageRun(
            memory=self._memory, view=self._view, pages=tuple(pages), page_bytes=self._plan.page_bytes, bytes=size
        )

    @property
    def memory(self) -> torch.Tensor:
        """All pages, flat uint8."""
        return self._memory

    @property
    def page_bytes(self) -> int:
        """Of every page of a slab but its last."""
        return self._plan.page_bytes

    def places(self, slab: int) -> list[Place]:
        """Every page of the slab."""
        return [(slab, number) for number in range(len(self._table[slab]))]

    def writable(self, place: Place) -> torch.Tensor | None:
        """Memory for new contents of the place, which nobody references and which is the slab's from now on.

        None while a reader holds what is there and all spare pages are in use.
        """
        slab, number = place
        home = self._plan.home[slab][number]
        with self._changed:
            old = self._table[slab][number]
            new = self._unread(home, old)
            if new is None:
                return None
            self._table[slab][number] = new
            if old is not new and old.references == 0:
                self._retire(old)
            return self._memory[new.start : new.start + home.bytes]

    def _unread(self, home: Page, old: Page) -> Page | None:
        for page in (home, old):
            if page.references == 0 or skipped("residency.copy-on-write"):
                return page
        return self._free.pop() if self._free else None

    def _retire(self, page: Page) -> None:
        if page.spare:
            self._free.append(page)

    def wait_for(self, places: Iterable[Place], *, since: float, seconds: float) -> None:
        """Until one of `places`, which were not writable, may be.

        Readers may take as long as they go on letting go of tensors. Raises ResidencyError, which says who reads, when
        none of them did for `seconds`, counted from `since` at the earliest (monotonic).
        """
        wanted = list(places)
        with self._changed:
            while not (self._free or any(self._could(place) for place in wanted)):
                left = max(since, self._progressed) + seconds - time.monotonic()
                if left <= 0:
                    raise ResidencyError(self._held_text(wanted, seconds))
                self._changed.wait(min(left, threading.TIMEOUT_MAX))

    def _could(self, place: Place) -> bool:
        slab, number = place
        return self._plan.home[slab][number].references == 0 or self._table[slab][number].references == 0

    def _held_text(self, places: Sequence[Place], seconds: float) -> str:
        held = sum(self._plan.home[slab][number].bytes for slab, number in places)
        readers = ", ".join(f"{reading.label} ({format_bytes(reading.bytes)})" for reading in self._readings)
        spares = sum(page.bytes for page in self._plan.spares)
        return (
            f"{len(places)} pages of the host copy ({format_bytes(held)}) cannot be written: after "
            f"{format_seconds(seconds)} without progress they are still read by {readers}, and all "
            f"{len(self._plan.spares)} spare pages ({format_bytes(spares)}) are in use; raise residency.spare, save "
            "less often, or see why the disk is slow"
        )

    def read(self, claims: Claims, label: str) -> "Reading":
        """Hold the present pages under all of `claims`; `label` says in messages who reads."""
        with self._changed:
            reading = Reading(self, claims, label, {place: self._table[place[0]][place[1]] for place in claims.readers})
            for page in reading.pages.values():
                page.references += 1
            self._readings.append(reading)
            return reading

    def _drop(self, reading: "Reading", places: Iterable[Place]) -> None:
        """Under the lock."""
        self._progressed = time.monotonic()
        for place in places:
            page = reading.pages.pop(place)
            page.references -= 1
            if page.references == 0 and page is not self._table[place[0]][place[1]]:
                self._retire(page)
        if not reading.pages and reading in self._readings:
            self._readings.remove(reading)
        self._changed.notify_all()

    @property
    def references(self) -> int:
        """References held on all pages together; 0 when no snapshot is alive."""
        with self._changed:
            return sum(len(reading.pages) for reading in self._readings)

    @property
    def bytes(self) -> int:
        """Host memory of all pages, spare ones and alignment included."""
        return self._plan.bytes

    @property
    def spare_pages(self) -> int:
        """Spare pages in use: for tests of what goes back."""
        with self._changed:
            return len(self._plan.spares) - len(self._free)

    def close(self) -> None:
        """Unpin everything. Snapshots that are still held stay readable: the mapping goes with its last view."""
        self._unmap()


class Reading:
    """The pages that one snapshot holds, each until every tensor on it was let go of. Any thread may call it."""

    def __init__(self, arena: Arena, claims: Claims, label: str, pages: dict[Place, Page]) -> None:
        self.label = label
        self.pages = pages
        self._arena = arena
        self._claims = claims
        self._readers = dict(claims.readers)
        self._gone: set[str] = set()
        self._released = False

    @property
    def bytes(self) -> int:
        """Of the pages still held."""
        return sum(page.bytes for page in self.pages.values())

    def holds(self, name: str) -> bool:
        """Whether the tensor may be read."""
        return not self._released and name not in self._gone

    def let_go(self, name: str) -> None:
        """The tensor is read no more; nothing when that was said before."""
        with self._arena._lock:
            if not self.holds(name):
                return
            self._gone.add(name)
            self._arena._progressed = time.monotonic()
            readers, last = self._readers, list[Place]()
            for place in self._claims.places.get(name, ()):
                readers[place] -= 1
                if readers[place] == 0:
                    last.append(place)
            # Whoever waits for a page need not look up for each of its tensors.
            if last:
                self._arena._drop(self, last)

    def release(self) -> None:
        """Nothing is read any more; nothing when that was said before."""
        with self._arena._changed:
            if self._released:
                return
            self._released = True
            self._arena._drop(self, list(self.pages))


def _nothing() -> None:
    pass
