"""A number that says which 32-bit words a tensor holds and where: the checksum for accelerators, in plain PyTorch.

The sum, modulo 2^64, of each word times a weight of its own. Every weight is odd, so no change of a single word goes
unseen. A word's weight is that of its place in a tile times that of its tile, which no two places share in a pattern:
words, rows or tiles that change places are seen. This is the slow twin of `tidemill.weights.word_kernel`, equal to it
bit for bit, for where that one cannot run.
"""

from collections.abc import Sequence

import torch

__all__ = ["SPREAD", "TILE", "TILES_FROM", "finished", "word_sum", "word_sums"]

SPREAD = 0x9E3779B97F4A7C15 - (1 << 64)
"""2^64 divided by the golden ratio, as a signed number: multiples of neighbours differ in every bit."""
TILE = 2048
"""Words of a tile."""
TILES_FROM = 1 << 40
"""What is added to a tile's number: else the weight of word 5 of tile 3 would be that of word 3 of tile 5."""

_SIZES_FROM = 1 << 50
_LOW = (1 << 32) - 1
_MASK = (1 << 64) - 1
# Tiles summed at once: bounds the memory that this takes to 32 MiB on a device, and to a core's cache on a CPU.
_CHUNK, _CHUNK_ON_CPU = 2048, 32


def word_sum(tensor: torch.Tensor) -> int:
    """Checksum of the elements, row-major, whatever strides and dtype. In [0, 2^64)."""
    return finished(int(word_sums([tensor])), tensor.nbytes)


def word_sums(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """int64 (N), on the device: of each tensor the sum that `finished` makes a checksum of. Waits for nothing."""
    places = _weights(0, TILE, tensors[0].device)
    return torch.stack([_sum(_words(tensor), places) for tensor in tensors])


def finished(total: int, nbytes: int) -> int:
    """The checksum of `nbytes` bytes whose words sum up to `total`: zeros of different lengths differ."""
    return (total + _weight(_SIZES_FROM + nbytes)) & _MASK


def _weight(place: int) -> int:
    """As `_weights` has it, as an unsigned number."""
    counted = (place + 1) * SPREAD & _MASK
    return (counted ^ counted >> 32) * SPREAD & _MASK | 1


def _weights(first: int, count: int, device: torch.device) -> torch.Tensor:
    # Not linear in the place: else changes at places of equal sum would look alike.
    counted = torch.arange(first + 1, first + count + 1, dtype=torch.int64, device=device).mul_(SPREAD)
    folded = counted.bitwise_right_shift(32).bitwise_and_(_LOW).bitwise_xor_(counted)
    return folded.mul_(SPREAD).bitwise_or_(1)


def _sum(words: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    """int64 scalar. `words` are int32 (n); `places` are the weights within a tile."""
    total = torch.zeros((), dtype=torch.int64, device=words.device)
    step = TILE * (_CHUNK_ON_CPU if words.device.type == "cpu" else _CHUNK)
    for start in range(0, words.numel(), step):
        chunk = words[start : start + step]
        whole = chunk.numel() // TILE
        first = TILES_FROM + start // TILE
        tiles = _weights(first, whole + 1, words.device)
        if whole:
            rows = chunk[: whole * TILE].view(whole, TILE)
            total += torch.mul(rows, places).sum(dim=1).mul_(tiles[:whole]).sum()
        rest = chunk[whole * TILE :]
        total += torch.mul(rest, places[: rest.numel()]).sum() * tiles[whole]
    return total


def _words(tensor: torch.Tensor) -> torch.Tensor:
    """Flat int32, the last one padded with zeros."""
    flat = tensor.detach().contiguous().view(-1)
    if flat.nbytes % 4 == 0 and flat.storage_offset() * flat.element_size() % 4 == 0 and flat.numel():
        return flat.view(torch.int32)
    raw = flat.view(torch.uint8)
    if raw.numel() % 4 or raw.storage_offset() % 4:
        padded = torch.zeros(-(-raw.numel() // 4) * 4, dtype=torch.uint8, device=raw.device)
        padded[: raw.numel()] = raw
        raw = padded
    return raw.view(torch.int32)
