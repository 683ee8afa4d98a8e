"""A snapshot of what is on the device now, taken before its copy to the host is complete.

Whoever needs the copy first ends it: the thread that writes a checkpoint, a sleep, or the owner who is about to change
something, and has to call `settle` before. So a save costs its owner no more than the begin of a copy.
"""

import threading
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol

from tidemill.contracts.checkpoint import HeldTensor, Snapshot, TensorSpec
from tidemill.errors import CheckpointError, ResidencyError
from tidemill.residency.ledger import Entry, Ledger

__all__ = ["Captures", "Promises"]


class Captures(Protocol):
    """What is needed of a saver."""

    @property
    def ledger(self) -> Ledger:
        """What it keeps."""
        ...

    @property
    def sealed_key(self) -> Hashable | None:
        """Of the contents of the host pages, when they are whole."""
        ...

    def capture(self, key: Hashable) -> object:
        """The device's contents are in the host pages when it returns."""
        ...

    def snapshot(self) -> Snapshot:
        """Of the host pages."""
        ...


class Promises:
    """Of one saver. For one owner, who changes the contents, and any number of threads that read."""

    def __init__(self, saver: Captures, wanted: Callable[[Entry], bool] = lambda entry: True) -> None:
        """Of the entries that are `wanted`: pages of others are not held."""
        self._saver = saver
        self._entries = {entry.name: entry for entry in saver.ledger if wanted(entry)}
        self._others = [entry.name for entry in saver.ledger if entry.name not in self._entries]
        self._layout = object()
        self._open: list[_Promise] = []

    def snapshot(self, key: Hashable) -> Snapshot:
        """Of the contents `key`, which are in the host pages or on the device. Reading its tensors waits for the copy.

        What the copy raises, reading raises, as CheckpointError.
        """
        self._open = [promise for promise in self._open if promise.open]
        promise = _Promise(self._saver, key, self._others)
        self._open.append(promise)
        if self._saver.sealed_key == key:
            promise.fulfil()
        return Snapshot(
            tensors=_PromisedTensors(self._entries, promise),
            written=promise.written,
            release=promise.release,
            layout=self._layout,
        )

    def settle(self) -> None:
        """Every snapshot has its copy, or never will: the contents may change. Raises nothing."""
        for promise in self._open:
            promise.fulfil()
        self._open = []


class _PromisedTensors(Mapping[str, HeldTensor]):
    """By name. Each is made when it is asked for: to mark a state takes as long for many tensors as for few."""

    def __init__(self, entries: Mapping[str, Entry], promise: "_Promise") -> None:
        self._entries = entries
        self._promise = promise

    def __getitem__(self, name: str) -> HeldTensor:
        entry, kept = self._entries[name], self._promise.kept
        return _PromisedTensor(entry, self._promise) if kept is None else kept.tensors[name]

    def __contains__(self, name: object) -> bool:
        return name in self._entries

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)


class _Promise:
    """Nothing, then a snapshot or the reason why there is none, then released."""

    def __init__(self, saver: Captures, key: Hashable, others: Sequence[str]) -> None:
        self._saver = saver
        self._key = key
        self._lock = threading.Lock()
        self._kept: Snapshot | None = None
        self._failure: Exception | None = None
        self._written: list[str] = list(others)
        self._released = False

    @property
    def open(self) -> bool:
        """Whether somebody may still ask for the copy."""
        return self._kept is None and self._failure is None and not self._released

    @property
    def kept(self) -> Snapshot | None:
        """What it became, from which it is read as well; it stays that."""
        return self._kept

    def fulfil(self) -> None:
        """End the copy, unless that was done, failed, or nobody wants it any more."""
        with self._lock:
            if not self.open:
                return
            try:
                self._saver.capture(self._key)
                if self._saver.sealed_key != self._key:
                    raise ResidencyError("the contents changed before they were copied: `settle` was not called")
                self._kept = self._saver.snapshot()
            except Exception as error:
                self._failure = error
                return
            for name in self._written:
                self._kept.written(name)

    def held(self, name: str) -> HeldTensor:
        """Raises CheckpointError when there is no copy."""
        self.fulfil()
        with self._lock:
            if self._kept is None:
                why = "it was let go of" if self._failure is None else f"the copy to the host failed: {self._failure}"
                raise CheckpointError(f"cannot read {name!r} from the host copy: {why}") from self._failure
            return self._kept.tensors[name]

    def written(self, name: str) -> None:
        """See Snapshot."""
        if self._kept is not None:
            self._kept.written(name)
            return
        with self._lock:
            if self._kept is None:
                self._written.append(name)
            else:
                self._kept.written(name)

    def release(self) -> None:
        """See Snapshot. A copy that nobody began to wait for is not waited for."""
        with self._lock:
            self._released = True
            if self._kept is not None:
                self._kept.release()


class _PromisedTensor:
    """Implements HeldTensor: what it is, at once; its bytes, when they are in the host pages."""

    __slots__ = ("_entry", "_promise")

    def __init__(self, entry: Entry, promise: _Promise) -> None:
        self._entry = entry
        self._promise = promise

    @property
    def dtype(self) -> str:
        """See SavedTensor."""
        return self._entry.dtype_name

    @property
    def shape(self) -> tuple[int, ...]:
        """See SavedTensor; of the piece."""
        return self._entry.shape

    @property
    def nbytes(self) -> int:
        """See HeldTensor."""
        return self._entry.bytes

    @property
    def spec(self) -> TensorSpec:
        """See HeldTensor."""
        return self._entry.spec

    def pieces(self) -> Iterable[memoryview]:
        """See HeldTensor."""
        return self._held.pieces()

    @property
    def data(self) -> memoryview:
        """See SavedTensor."""
        return self._held.data

    def read(self, offset: tuple[int, ...], shape: tuple[int, ...]) -> memoryview:
        """See SavedTensor."""
        return self._held.read(offset, shape)

    @property
    def _held(self) -> HeldTensor:
        return self._promise.held(self._entry.name)

    def __reduce__(self) -> tuple[Any, ...]:
        # Pages cannot be sent to another process; their bytes can.
        return self._held.__reduce__()  # type: ignore[return-value]
