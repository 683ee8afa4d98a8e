"""Which replica is asked which request: equal prompts go to one, and none is asked much more than its share.

Consistent hashing with bounded loads: replicas lie on a ring, each in many places; a prompt belongs to the first
replica behind its own place that is not full. A replica that goes or comes moves its own prompts only, so that the
others keep what they have cached.

Source: Mirrokni, Thorup, Zadimoghaddam 2018, "Consistent hashing with bounded loads", arXiv:1608.01350.
"""

import bisect
import hashlib
import math
from collections.abc import Sequence

__all__ = ["Ring", "routed"]

_PLACES = 64  # of each replica: shares of the ring then differ by about an eighth
_OVER = 1.25  # times the mean that a replica may be asked
_HEAD = 256  # tokens of a prompt that say where it belongs


class Ring:
    """Where prompts belong among `names`."""

    def __init__(self, names: Sequence[str]) -> None:
        self._places = sorted((_hash(f"{name}#{place}".encode()), name) for name in names for place in range(_PLACES))

    def order(self, token_ids: Sequence[int]) -> list[str]:
        """Every replica, the one that a prompt belongs to first, then those that stand in for it."""
        key = b"".join(int(token).to_bytes(8, "little", signed=True) for token in token_ids[:_HEAD])
        start = bisect.bisect(self._places, (_hash(key), ""))
        around = self._places[start:] + self._places[:start]
        return list(dict.fromkeys(name for _, name in around))


def routed(ring: Ring, prompts: Sequence[Sequence[int]], names: Sequence[str]) -> dict[str, list[int]]:
    """Indices of `prompts` by replica, in order. None of `names`, one at least, has more than 1.25 of the mean.

    That is rounded up. Samples of one prompt stay together as far as that allows.
    """
    most = math.ceil(_OVER * len(prompts) / len(names))
    found: dict[str, list[int]] = {name: [] for name in names}
    orders: dict[tuple[int, ...], list[str]] = {}
    for index, prompt in enumerate(prompts):
        head = tuple(prompt[:_HEAD])
        if head not in orders:
            orders[head] = [name for name in ring.order(head) if name in found]
        # There is room: all together may have more than there is.
        chosen = next(name for name in orders[head] if len(found[name]) < most)
        found[chosen].append(index)
    return found


def _hash(data: bytes) -> int:
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "big")
