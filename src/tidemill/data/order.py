"""The order of an epoch and the digest of what was consumed of it, from names alone.

Shuffling sorts the rows by `blake2b(seed, epoch, id)`, 16 bytes. It depends on no library's generator, so that the
order is the same on every machine and under every version, and rows keep their order when others are added.
"""

import hashlib
from collections.abc import Sequence

__all__ = ["EpochOrder", "shuffled"]


def shuffled(ids: Sequence[str], *, seed: int, epoch: int) -> list[int]:
    """Indices of `ids` in the shuffled order of that epoch."""
    keys = [hashlib.blake2b(f"{seed}\0{epoch}\0{id}".encode(), digest_size=16).digest() for id in ids]
    return sorted(range(len(ids)), key=lambda index: (keys[index], index))


class EpochOrder:
    """Indices of one epoch in order, with a rolling digest: `d(0) = ""`, `d(i + 1) = blake2b(d(i), id of row i)`."""

    def __init__(self, ids: Sequence[str], indices: Sequence[int]) -> None:
        self.indices = tuple(indices)
        self._ids = ids
        self._digests = [""]

    def digest(self, position: int) -> str:
        """Digest over the ids of the first `position` rows; 32 hexadecimal digits, empty for none."""
        for index in self.indices[len(self._digests) - 1 : position]:
            text = f"{self._digests[-1]}\0{self._ids[index]}"
            self._digests.append(hashlib.blake2b(text.encode(), digest_size=16).hexdigest())
        return self._digests[position]
