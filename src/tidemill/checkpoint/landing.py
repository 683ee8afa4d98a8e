"""Which bytes of a file are which of a tensor's: they are put where they belong while they are verified."""

import math
from bisect import bisect_right

from tidemill.checkpoint.manifest import FileEntry, Slice
from tidemill.checkpoint.safetensors_header import ITEM_BYTES
from tidemill.checkpoint.stored_tensor import is_one_stretch
from tidemill.contracts.landing import Landing

__all__ = ["LandingFile"]


class LandingFile:
    """One file, whose bytes land. What is in its manifest need not be true: it is not known yet."""

    def __init__(self, entry: FileEntry, landing: Landing) -> None:
        self._landing = landing
        self._slices = sorted((one for one in entry.slices if _is_stretch(one)), key=lambda one: one.begin)
        self._begins = [one.begin for one in self._slices]

    def seen(self, at: int, data: memoryview) -> None:
        """Bytes of the file from its byte `at` on; of each once, in any order, from any thread."""
        end = at + len(data)
        for number in range(max(0, bisect_right(self._begins, at) - 1), len(self._slices)):
            piece = self._slices[number]
            if piece.begin >= end:
                return
            first, last = max(at, piece.begin), min(end, piece.end)
            if first < last:
                start = _start(piece) + first - piece.begin
                self._landing.land(piece.name, start, data[first - at : last - at])


def _is_stretch(piece: Slice) -> bool:
    """Whether its bytes follow each other in the whole tensor, too."""
    whole, shape = piece.global_shape, piece.local_shape
    if not 0 < piece.end - piece.begin == ITEM_BYTES[piece.dtype] * math.prod(shape):
        return False
    return shape == whole or (len(shape) == len(whole) == len(piece.offset) and is_one_stretch(whole, shape))


def _start(piece: Slice) -> int:
    """Its first byte in the whole tensor."""
    whole = piece.global_shape
    rows = sum(index * math.prod(whole[number + 1 :]) for number, index in enumerate(piece.offset) if index)
    return ITEM_BYTES[piece.dtype] * rows
