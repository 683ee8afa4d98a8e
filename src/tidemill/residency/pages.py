"""Host memory that holds what sleeps, cut into pages, and how the pages of one slab are one stretch of bytes."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch

__all__ = ["Page", "PagePlan", "PageRun", "plan_pages"]

# Where DMA engines and direct writes are at ease.
_ALIGNMENT = 4096
_SMALL = 16 << 10


@dataclass(eq=False)
class Page:
    """`bytes` of the mapping, from its byte `start` on. `references` counts readers; a `spare` one is no slab's own."""

    start: int
    bytes: int
    spare: bool
    references: int = 0


@dataclass(frozen=True, kw_only=True, eq=False)
class PagePlan:
    """Pages of slabs, one behind the other, then spare pages, any of which may stand in for any page of a slab.

    Every page of a slab but its last has `page_bytes`; `bytes` is what all of them take.
    """

    page_bytes: int
    home: tuple[tuple[Page, ...], ...]
    spares: tuple[Page, ...]
    bytes: int


def plan_pages(sizes: Sequence[int], *, page_bytes: int, spare_bytes: int | None) -> PagePlan:
    """Where the pages of slabs of `sizes` bytes will lie, with at most `spare_bytes` in spare ones.

    Without a number these are a tenth of the state, and two pages at least. Slabs and spare pages begin where DMA is at
    ease if pages within a slab do, else like them: what small pages take is their bytes, not alignment.
    """
    # The largest power of two that divides a page.
    unit = min(_ALIGNMENT, page_bytes & -page_bytes)
    home, start = [], 0
    for size in sizes:
        cuts = range(0, size, page_bytes)
        home.append(tuple(Page(start + cut, min(page_bytes, size - cut), spare=False) for cut in cuts))
        start = _aligned(start + size, unit)
    largest = max((page.bytes for pages in home for page in pages), default=0)
    step = _aligned(largest, unit)
    room = max(2 * step, sum(sizes) // 10) if spare_bytes is None else spare_bytes
    count = room // step if step else 0
    spares = tuple(Page(start + index * step, largest, spare=True) for index in range(count))
    total = start + count * step
    return PagePlan(page_bytes=page_bytes, home=tuple(home), spares=spares, bytes=total)


@dataclass(frozen=True, kw_only=True, eq=False)
class PageRun:
    """The pages that held one slab of `bytes` at one moment, as one stretch of bytes, wherever each of them lies.

    `memory` is the whole mapping, flat uint8; `view` are the same bytes.
    """

    memory: torch.Tensor
    view: memoryview
    pages: tuple[Page, ...]
    page_bytes: int
    bytes: int

    def spans(self, start: int, end: int) -> list[tuple[int, int]]:
        """Where bytes `[start, end)` of the slab lie in the mapping, in order; what is adjacent there is one span."""
        number, within = divmod(start, self.page_bytes)
        if start < end <= (number + 1) * self.page_bytes:
            first = self.pages[number].start + within
            return [(first, first + end - start)]
        found: list[tuple[int, int]] = []
        while start < end:
            within = start % self.page_bytes
            count = min(self.page_bytes - within, end - start)
            first = self.pages[start // self.page_bytes].start + within
            if found and found[-1][1] == first:
                found[-1] = (found[-1][0], first + count)
            else:
                found.append((first, first + count))
            start += count
        return found

    def views(self, start: int, end: int) -> Iterator[memoryview]:
        """Bytes `[start, end)` of the slab as views, one after the other."""
        return (self.view[first:last] for first, last in self.spans(start, end))

    def joined(self, start: int, end: int) -> memoryview:
        """Bytes `[start, end)` of the slab: a view where they are adjacent, else a copy."""
        views = list(self.views(start, end))
        return views[0] if len(views) == 1 else memoryview(bytearray().join(views))

    def put(self, start: int, data: memoryview) -> None:
        """Write flat `data` from byte `start` of the slab on."""
        done = 0
        for view in self.views(start, start + len(data)):
            _copy(view, data[done : done + len(view)])
            done += len(view)

    def stretches(self) -> Iterator[tuple[int, torch.Tensor]]:
        """All of it for copies, few and large: each stretch, behind the byte of the slab at which it begins."""
        begin = 0
        for first, last in self.spans(0, self.bytes):
            yield begin, self.memory[first:last]
            begin += last - first


def _copy(to: memoryview, data: memoryview) -> None:
    """Of large ones other threads need not wait for the end."""
    if len(data) < _SMALL:
        to[:] = data
    else:
        np.copyto(np.frombuffer(to, dtype=np.uint8), np.frombuffer(data, dtype=np.uint8))


def _aligned(size: int, to: int) -> int:
    return -(-size // to) * to
