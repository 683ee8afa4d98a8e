"""Host pages as the place where a checkpoint is read to: put there while it is verified, used only if it was right."""

import threading
from collections.abc import Callable, Mapping
from functools import cache

from tidemill.contracts.checkpoint import SavedTensor
from tidemill.residency.contents import put_all
from tidemill.residency.ledger import NO_SLAB, Entry, Ledger
from tidemill.residency.pages import PageRun

__all__ = ["Landed"]


class Landed:
    """Implements `Landing`: what came to lie in the pages, until it is closed. Pages are nobody else's meanwhile."""

    def __init__(self, ledger: Ledger, run_of: Callable[[int], PageRun]) -> None:
        """`run_of` gives the pages of a slab, which may all be written."""
        self._ledger, self._entries = ledger, ledger.by_name
        self._run_of = cache(run_of)
        self._bytes: dict[str, int] = {}
        self._changed = threading.Condition()
        self._writing = 0
        self._closed = False

    def land(self, name: str, start: int, data: memoryview) -> None:
        """See Landing. Of what lies here as a part of the whole, or not row-major, nothing is kept."""
        entry = self._entries.get(name)
        if entry is None or not _can_hold(entry, start + len(data)):
            return
        with self._changed:
            if self._closed:
                return
            self._writing += 1
        try:
            self._run_of(entry.slab).put(entry.offset + start, data)
        finally:
            with self._changed:
                self._writing -= 1
                self._bytes[name] = self._bytes.get(name, 0) + len(data)
                self._changed.notify_all()

    @property
    def open(self) -> bool:
        """Whether what landed is still there."""
        return not self._closed

    def complete(self, tensors: Mapping[str, SavedTensor]) -> None:
        """Put in, of all `tensors`, those that did not land whole. Raises CheckpointError, and what reading raises."""
        put_all([entry for entry in self._ledger if not self._holds(entry)], self._run_of, tensors)

    def _holds(self, entry: Entry) -> bool:
        return self._bytes.get(entry.name, 0) == entry.bytes

    def close(self) -> None:
        """Nothing is written any more, and nothing of it is worth anything, when it returns."""
        with self._changed:
            self._closed = True
            self._changed.wait_for(lambda: not self._writing)
            self._bytes.clear()


def _can_hold(entry: Entry, end: int) -> bool:
    whole = entry.whole is None or entry.whole == entry.shape
    return entry.slab != NO_SLAB and whole and entry.row_major and end <= entry.bytes
