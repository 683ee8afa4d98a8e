"""Moments that begin at zero, for a checkpoint without any: a resume has to ask for them by name."""

import math
from collections.abc import Collection, Iterable, Mapping

from tidemill.contracts.checkpoint import SavedTensor
from tidemill.residency.ledger import Entry

__all__ = ["ACCEPTED", "with_fresh_moments"]

ACCEPTED = "optimizer"
"""The name in `checkpoint.accept`."""

_PREFIX = "optimizer/"


def with_fresh_moments(
    tensors: Mapping[str, SavedTensor], entries: Iterable[Entry], moments: Collection[str]
) -> dict[str, SavedTensor]:
    """`tensors` with zeros for all `moments`, those that are there too: some without the others mean nothing."""
    kept: dict[str, SavedTensor] = {name: held for name, held in tensors.items() if not name.startswith(_PREFIX)}
    return kept | {entry.name: _Zeros(entry) for entry in entries if entry.name in moments}


class _Zeros:
    """Implements `SavedTensor`: the whole of which an entry is a piece, made where it is read."""

    def __init__(self, entry: Entry) -> None:
        self.dtype = entry.dtype_name
        self.shape = entry.shape if entry.whole is None else entry.whole
        self._item = entry.dtype.itemsize

    @property
    def data(self) -> memoryview:
        return self.read((0,) * len(self.shape), self.shape)

    def read(self, offset: tuple[int, ...], shape: tuple[int, ...]) -> memoryview:
        return memoryview(bytes(self._item * math.prod(shape)))
