"""A number that says whether two tensors hold the same bytes.

On a CPU xxh3 of the bytes. On an accelerator a weighted sum of 64-bit words modulo 2^64, computed where the tensor is,
since eight bytes cross the bus rather than the tensor: every step of it can be undone, so no change of a single word
goes unseen.
Only checksums from the same kind of device can be compared.
"""

import ctypes

import torch
import xxhash

__all__ = ["checksum", "word_sum"]

# 2^64 divided by the golden ratio, as a signed number: the weights of neighbouring words differ in every bit.
_SPREAD = 0x9E3779B97F4A7C15 - (1 << 64)
_LOW = (1 << 32) - 1
# Words summed at once: bounds the device memory that this takes to 64 MiB.
_CHUNK = 1 << 21


def checksum(tensor: torch.Tensor) -> int:
    """Of the elements, row-major, whatever the strides; shape and dtype are not part of it. In [0, 2^64)."""
    flat = tensor.detach().contiguous().view(-1)
    if flat.device.type != "cpu":
        return word_sum(flat)
    # By address: `Tensor.numpy` would make the storage impossible to release for ever after.
    return xxhash.xxh3_64_intdigest((ctypes.c_char * flat.nbytes).from_address(flat.data_ptr()) if flat.nbytes else b"")


def word_sum(tensor: torch.Tensor) -> int:
    """The sum for accelerators, of any tensor: word `i` of a chunk times an odd weight; chunks are chained likewise."""
    words = _words(tensor)
    total = torch.full((), tensor.numel(), dtype=torch.int64, device=tensor.device)
    if words.numel() == 0:
        return int(total) % (1 << 64)
    weights = _weights(min(_CHUNK, words.numel()), tensor.device)
    for start in range(0, words.numel(), _CHUNK):
        chunk = words[start : start + _CHUNK]
        # Upper half into lower half: a product alone would drop all but one bit of what a flipped sign changes, and
        # two flipped signs would cancel.
        total = total * _SPREAD + _folded(chunk * _SPREAD).mul_(weights[: chunk.numel()]).sum()
    return int(total) % (1 << 64)


def _weights(count: int, device: torch.device) -> torch.Tensor:
    # Not linear in the position: else changes at positions of equal sum would look alike.
    counted = torch.arange(1, count + 1, dtype=torch.int64, device=device).mul_(_SPREAD)
    return _folded(counted).mul_(_SPREAD).bitwise_or_(1)


def _folded(words: torch.Tensor) -> torch.Tensor:
    return words.bitwise_right_shift(32).bitwise_and_(_LOW).bitwise_xor_(words)


def _words(tensor: torch.Tensor) -> torch.Tensor:
    raw = tensor.detach().contiguous().view(-1).view(torch.uint8)
    rest = raw.numel() % 8
    if rest or raw.storage_offset() % 8:
        padded = torch.zeros(raw.numel() + (8 - rest) % 8, dtype=torch.uint8, device=raw.device)
        padded[: raw.numel()] = raw
        raw = padded
    return raw.view(torch.int64)
