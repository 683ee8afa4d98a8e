"""A number that says whether two tensors hold the same bytes.

On a CPU xxh3 of the bytes. On an accelerator a weighted sum of 32-bit words modulo 2^64, computed where the tensor is,
since eight bytes cross the bus rather than the tensor. All weights are odd, so no change of a single word goes unseen.
Only checksums from the same kind of device can be compared.
"""

import ctypes
from collections.abc import Iterable

import torch
import xxhash

__all__ = ["Checksums", "checksum", "checksums", "word_sum"]

# 2^64 divided by the golden ratio, as a signed number: the weights of neighbouring words differ in every bit.
_SPREAD = 0x9E3779B97F4A7C15 - (1 << 64)
_LOW = (1 << 32) - 1
# Words summed at once: bounds the device memory that this takes to 64 MiB.
_CHUNK = 1 << 22


def checksum(tensor: torch.Tensor) -> int:
    """Of the elements, row-major, whatever the strides; shape and dtype are not part of it. In [0, 2^64)."""
    return checksums([("", tensor)])[""]


def checksums(tensors: Iterable[tuple[str, torch.Tensor]]) -> dict[str, int]:
    """Of each, by name."""
    sums = Checksums()
    for name, tensor in tensors:
        sums.add(name, tensor)
    return sums.take()


class Checksums:
    """Checksums of many tensors. An accelerator is asked once, for all of them: each question waits for its queue."""

    def __init__(self) -> None:
        self._known: dict[str, int] = {}
        self._queued: dict[str, _Sum] = {}
        self._weights: dict[torch.device, torch.Tensor] = {}

    def add(self, name: str, tensor: torch.Tensor) -> None:
        """Of `tensor` as it is now; what changes it later must be queued on the same stream."""
        flat = tensor.detach().contiguous().view(-1)
        if flat.device.type == "cpu":
            self._known[name] = _of_bytes(flat)
        else:
            self._queued[name] = _Sum(flat, self._weights_on(flat.device))

    def take(self) -> dict[str, int]:
        """All of them, in the order in which they came; forgets them."""
        order = [*self._known, *self._queued]
        parts = [part for queued in self._queued.values() for part in queued.parts]
        values = iter(torch.stack(parts).tolist() if parts else ())
        found = self._known | {name: queued.total(values) for name, queued in self._queued.items()}
        self._known, self._queued, self._weights = {}, {}, {}
        return {name: found[name] for name in order}

    def _weights_on(self, device: torch.device) -> torch.Tensor:
        if device not in self._weights:
            self._weights[device] = _weights(_CHUNK, device)
        return self._weights[device]


def word_sum(tensor: torch.Tensor) -> int:
    """The sum for accelerators, of any tensor: word `i` of a chunk times an odd weight; chunks are chained likewise."""
    words = -(-tensor.numel() * tensor.element_size() // 4)
    summed = _Sum(tensor, _weights(min(_CHUNK, words), tensor.device))
    return summed.total(iter(int(part) for part in summed.parts))


class _Sum:
    """The sums of a tensor's chunks, each a number on its device."""

    def __init__(self, tensor: torch.Tensor, weights: torch.Tensor) -> None:
        self.elements = tensor.numel()
        words = _words(tensor)
        # Most tensors are one chunk, and there are hundreds in a sync: no step more than it takes.
        chunks = (words,) if 0 < len(words) <= _CHUNK else torch.split(words, _CHUNK)
        self.parts = [torch.mul(chunk, weights[: len(chunk)]).sum() for chunk in chunks if len(chunk)]

    def total(self, values: Iterable[int]) -> int:
        """Chained, once the sums are known: takes as many of `values` as there are parts."""
        total = self.elements
        for _, value in zip(self.parts, values, strict=False):
            total = (total * _SPREAD + value) % (1 << 64)
        return total


def _of_bytes(flat: torch.Tensor) -> int:
    # By address: `Tensor.numpy` would make the storage impossible to release for ever after.
    return xxhash.xxh3_64_intdigest((ctypes.c_char * flat.nbytes).from_address(flat.data_ptr()) if flat.nbytes else b"")


def _weights(count: int, device: torch.device) -> torch.Tensor:
    # Not linear in the position: else changes at positions of equal sum would look alike.
    counted = torch.arange(1, count + 1, dtype=torch.int64, device=device).mul_(_SPREAD)
    folded = counted.bitwise_right_shift(32).bitwise_and_(_LOW).bitwise_xor_(counted)
    return folded.mul_(_SPREAD).bitwise_or_(1)


def _words(tensor: torch.Tensor) -> torch.Tensor:
    """Flat int32, the last one padded with zeros."""
    flat = tensor.detach().contiguous().view(-1)
    if flat.nbytes % 4 == 0 and flat.storage_offset() * flat.element_size() % 4 == 0 and flat.numel():
        return flat.view(torch.int32)
    raw = flat.view(torch.uint8)
    rest = raw.numel() % 4
    if rest or raw.storage_offset() % 4:
        padded = torch.zeros(raw.numel() + (4 - rest) % 4, dtype=torch.uint8, device=raw.device)
        padded[: raw.numel()] = raw
        raw = padded
    return raw.view(torch.int32)
