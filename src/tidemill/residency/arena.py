"""Host memory that holds what sleeps: one page for each slab, spare pages for those that a writer still reads.

The pages of all slabs lie in one mapping, allocated and touched once: pinned memory allocated in each sleep is what
makes others run at a tenth of the bus. A page that a snapshot references is never written; its slab moves to a spare
page (copy-on-write) and back home when it can.
"""

import mmap
import threading
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import torch

from tidemill.errors import ResidencyError
from tidemill.units import MIB, format_bytes

__all__ = ["Arena", "Page", "map_pinned", "map_plain"]

# Where DMA engines and O_DIRECT writes are at ease.
_ALIGNMENT = 4096
_TOUCH_BYTES = 256 * MIB

MapMemory = Callable[[int], tuple[mmap.mmap, Callable[[], None]]]


@dataclass(eq=False)
class Page:
    """Host memory of one slab. `memory` is flat uint8; `view` are the same bytes; `references` counts its readers."""

    memory: torch.Tensor
    view: memoryview
    unmap: Callable[[], object]
    spare: bool
    references: int = field(default=0)

    @property
    def bytes(self) -> int:
        """Size of the page."""
        return self.memory.numel()


def map_plain(size: int) -> tuple[mmap.mmap, Callable[[], None]]:
    """`size` bytes of anonymous memory; the system provides them when they are first written."""
    return mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS), lambda: None


def map_pinned(size: int) -> tuple[mmap.mmap, Callable[[], None]]:
    """`size` bytes in huge pages, touched by several threads and then registered with CUDA in one call.

    In this order: registering pages that exist runs ten times as fast as allocating pinned memory.
    """
    memory, _ = map_plain(size)
    memory.madvise(mmap.MADV_HUGEPAGE)
    whole = torch.frombuffer(memory, dtype=torch.uint8)
    with ThreadPoolExecutor(max_workers=16) as pool:
        list(pool.map(lambda start: whole[start : start + _TOUCH_BYTES].zero_(), range(0, size, _TOUCH_BYTES)))
    address = whole.data_ptr()
    runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    code = int(runtime.cudaHostRegister(address, size, 0))
    if code != 0:
        raise ResidencyError(
            f"cannot pin {format_bytes(size)} of host memory: cudaHostRegister returned {code}; "
            "raise the limit of locked memory (ulimit -l) or free host memory"
        )
    return memory, lambda: runtime.cudaHostUnregister(address)


class Arena:
    """Pages of `sizes` bytes, one for each slab, and the table that says which page holds which slab.

    At most `idle_spare_bytes` of spare pages are kept when nobody uses them; the others go back to the system.
    """

    def __init__(self, *, sizes: Sequence[int], map_memory: MapMemory, idle_spare_bytes: int) -> None:
        self._map = map_memory
        self._idle_limit = idle_spare_bytes
        self._idle: list[Page] = []
        self._spares: set[Page] = set()
        self._lock = threading.Lock()
        self._home = self._map_home(sizes)
        self._table = list(self._home)

    def _map_home(self, sizes: Sequence[int]) -> list[Page]:
        aligned = [-(-size // _ALIGNMENT) * _ALIGNMENT for size in sizes]
        total = sum(aligned)
        if total == 0:
            return []
        memory, unmap = self._map(total)
        self._unmap_home = weakref.finalize(self, unmap)
        whole, view = torch.frombuffer(memory, dtype=torch.uint8), memoryview(memory)
        pages, start = [], 0
        for size, step in zip(sizes, aligned, strict=True):
            page = Page(whole[start : start + size], view[start : start + size], lambda: None, spare=False)
            pages.append(page)
            start += step
        return pages

    def page(self, slab: int) -> Page:
        """The page that holds the slab now."""
        return self._table[slab]

    def writable(self, slab: int) -> Page:
        """A page for new contents of the slab: nobody references it. It becomes the slab's page in the table."""
        with self._lock:
            old = self._table[slab]
            home = self._home[slab]
            if home.references == 0:
                new = home
            elif old.references == 0:
                new = old
            else:
                new = self._spare(home.bytes)
            self._table[slab] = new
            if old is not new and old.references == 0:
                self._retire(old)
            return new

    def reference(self) -> list[Page]:
        """Every slab's page, each with one reference more; `release` takes them away."""
        with self._lock:
            pages = list(self._table)
            for page in pages:
                page.references += 1
            return pages

    def release(self, pages: Sequence[Page]) -> None:
        """Take one reference from each page."""
        with self._lock:
            for page in pages:
                page.references -= 1
                if page.references == 0 and page not in self._table:
                    self._retire(page)

    def _spare(self, size: int) -> Page:
        fitting = [page for page in self._idle if page.bytes == size]
        if fitting:
            self._idle.remove(fitting[0])
            return fitting[0]
        memory, unmap = self._map(size)
        # A finalizer runs once, at the latest when the arena or the process ends: pinned memory is never just dropped.
        once = weakref.finalize(self, unmap)
        page = Page(torch.frombuffer(memory, dtype=torch.uint8), memoryview(memory), once, spare=True)
        self._spares.add(page)
        return page

    def _retire(self, page: Page) -> None:
        if not page.spare:
            return
        if sum(idle.bytes for idle in self._idle) + page.bytes <= self._idle_limit:
            self._idle.append(page)
            return
        self._spares.discard(page)  # gone already when the arena was closed under a reader
        # The mapping itself goes when the last view of it does: a reader that is late reads old bytes, not a fault.
        page.unmap()

    @property
    def references(self) -> int:
        """References held on all pages together; 0 when no snapshot is alive."""
        with self._lock:
            return sum(page.references for page in {*self._home, *self._spares})

    @property
    def bytes(self) -> int:
        """Host memory of all pages, spare ones included."""
        with self._lock:
            return sum(page.bytes for page in self._home) + sum(page.bytes for page in self._spares)

    @property
    def spare_bytes(self) -> int:
        """Host memory of spare pages, used or idle: for tests of what is kept and what goes back."""
        with self._lock:
            return sum(page.bytes for page in self._spares)

    def close(self) -> None:
        """Unpin everything. Snapshots that are still held stay readable."""
        with self._lock:
            for page in self._spares:
                page.unmap()
            self._spares.clear()
            self._idle.clear()
            if self._home:
                self._unmap_home()
