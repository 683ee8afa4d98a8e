"""The checksum for accelerators as one launch for many tensors, at the rate at which the device reads memory.

Equal bit for bit to `tidemill.weights.word_sums`. A program sums some tiles of one tensor, word by word times the
weight of the tile, then times the weights of the places within a tile, and adds the result to the tensor's sum:
additions modulo 2^64 come to the same in any order. Tensors may have any number of bytes and lie at any address. A
float32 tensor can be summed as the bfloat16 or float16 that it would be cast to, without being written.

Importing this needs Triton.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl

from tidemill.weights.word_sums import SPREAD, TILE, TILES_FROM

__all__ = ["can_cast", "kernel_sums"]

# Tiles that one program sums: 128 KiB. Fewer would make the table of programs long, more would leave few programs.
_SPAN = 16
# Where vector loads may begin.
_ALIGNMENT = 16

# How a word is read: as it lies, of bytes at any address, or of two float32 cast to ...
_PLAIN, _BYTES, _BFLOAT16, _FLOAT16 = range(4)
_CASTS = {torch.bfloat16: _BFLOAT16, torch.float16: _FLOAT16}

_spread = tl.constexpr(SPREAD)
_tiles_from = tl.constexpr(TILES_FROM)
_plain = tl.constexpr(_PLAIN)
_bytes = tl.constexpr(_BYTES)
_bfloat16 = tl.constexpr(_BFLOAT16)


def can_cast(tensor: torch.Tensor, dtype: torch.dtype) -> bool:
    """Whether `kernel_sums` can sum it as `dtype` from where it lies."""
    return (
        tensor.dtype == torch.float32
        and dtype in _CASTS
        and tensor.is_contiguous()
        and tensor.data_ptr() % _ALIGNMENT == 0
    )


def kernel_sums(tensors: Sequence[torch.Tensor], dtypes: Sequence[torch.dtype]) -> torch.Tensor:
    """int64 (N), on the device of the tensors: of each the sum that `word_sums.finished` makes a checksum of.

    Each is contiguous, and of the dtype that goes with it unless `can_cast` says so. Waits for nothing.
    """
    device = tensors[0].device
    kinds = np.array([_kind(tensor, dtype) for tensor, dtype in zip(tensors, dtypes, strict=True)])
    sizes = [tensor.numel() * dtype.itemsize for tensor, dtype in zip(tensors, dtypes, strict=True)]
    table = np.array([[tensor.data_ptr() for tensor in tensors], sizes], dtype=np.int64)
    sums = torch.zeros(len(tensors), dtype=torch.int64, device=device)
    for kind in range(4):
        chosen = np.flatnonzero((kinds == kind) & (table[1] > 0))
        if len(chosen):
            _launch(table[:, chosen], chosen, kind, sums)
    return sums


def _kind(tensor: torch.Tensor, dtype: torch.dtype) -> int:
    if tensor.dtype != dtype:
        return _CASTS[dtype]
    return _BYTES if tensor.data_ptr() % _ALIGNMENT else _PLAIN


def _launch(table: "np.ndarray[Any, Any]", numbers: "np.ndarray[Any, Any]", kind: int, sums: torch.Tensor) -> None:
    """Sum tensors of one kind: `table` has their addresses and sizes (2, n), `numbers` their places in `sums`."""
    programs = -(-table[1] // (4 * TILE * _SPAN))
    rows = np.concatenate([table, [np.cumsum(programs) - programs, numbers, programs]])
    on_device = torch.from_numpy(rows).to(sums.device, non_blocking=True)
    count = int(programs.sum())
    owners = torch.repeat_interleave(on_device[4], output_size=count)
    with torch.cuda.device_of(sums):  # type: ignore[no-untyped-call]
        _sum_spans[(count,)](
            on_device, owners, sums, len(programs), kind=kind, tile_words=TILE, span=_SPAN, num_warps=4
        )


@triton.jit(do_not_specialize=["count"])  # type: ignore[untyped-decorator]
def _sum_spans(rows, owners, sums, count, kind: tl.constexpr, tile_words: tl.constexpr, span: tl.constexpr):  # type: ignore[no-untyped-def]
    """One program: `span` tiles of one tensor, or those that are left of it."""
    program = tl.program_id(0)
    row = rows + tl.load(owners + program)
    address = tl.load(row)
    size = tl.load(row + count)
    first = (program - tl.load(row + 2 * count)) * span
    places = tl.arange(0, tile_words)
    end = tl.minimum(first + span, size // (4 * tile_words))
    total = tl.zeros((tile_words,), dtype=tl.int64)
    place = first + _tiles_from
    for tile in tl.range(first, end, loop_unroll_factor=2):
        total += _words(address, tile * tile_words, places, kind).to(tl.int64) * _weights(place)
        place += 1
    if end < first + span:
        # The last words of the tensor, and what is left of one.
        rest = size - end * (4 * tile_words)
        if rest > 0:
            total += _last_words(address, end * tile_words, places, rest, kind).to(tl.int64) * _weights(place)
    tl.atomic_add(sums + tl.load(row + 3 * count), tl.sum(total * _weights(places.to(tl.int64)), axis=0))


@triton.jit
def _weights(places):  # type: ignore[no-untyped-def]
    """Odd weights of int64 places, as `word_sums` has them."""
    counted = (places + 1) * _spread
    return (counted ^ ((counted >> 32) & 0xFFFFFFFF)) * _spread | 1


@triton.jit  # type: ignore[untyped-decorator]
def _words(address, start, places, kind: tl.constexpr):  # type: ignore[no-untyped-def]
    """int32 words from word `start` on, all of them there."""
    if kind == _plain:
        words = tl.multiple_of(address.to(tl.pointer_type(tl.int32)), 16)
        return tl.load(words + start + places)
    elif kind == _bytes:
        return _bytes_of(address, start, places, 1 << 20)
    else:
        pairs = tl.multiple_of(address.to(tl.pointer_type(tl.int64)), 16)
        pair = tl.load(pairs + start + places)
        low = (pair & 0xFFFFFFFF).to(tl.uint32).to(tl.float32, bitcast=True)
        high = ((pair >> 32) & 0xFFFFFFFF).to(tl.uint32).to(tl.float32, bitcast=True)
        return _joined(low, high, kind)


@triton.jit  # type: ignore[untyped-decorator]
def _last_words(address, start, places, rest, kind: tl.constexpr):  # type: ignore[no-untyped-def]
    """int32 words from word `start` on, zeros beyond `rest` bytes."""
    if kind == _plain:
        words = address.to(tl.pointer_type(tl.int32)) + start
        # Whole ones: of the last one no more than three bytes lie beyond the tensor, in the same aligned word.
        found = tl.load(words + places, mask=places * 4 < rest, other=0)
        left = tl.minimum(rest - places * 4, 4)
        return tl.where(left == 4, found, found & ((1 << (tl.minimum(tl.maximum(left, 0), 3) * 8).to(tl.int32)) - 1))
    elif kind == _bytes:
        return _bytes_of(address, start, places, rest)
    else:
        halves = address.to(tl.pointer_type(tl.float32)) + start * 2
        low = tl.load(halves + places * 2, mask=places * 4 < rest, other=0.0)
        high = tl.load(halves + places * 2 + 1, mask=places * 4 + 2 < rest, other=0.0)
        return _joined(low, high, kind)


@triton.jit
def _bytes_of(address, start, places, rest):  # type: ignore[no-untyped-def]
    """As `_last_words`, of a tensor that begins anywhere."""
    raw = address.to(tl.pointer_type(tl.uint8)) + start * 4 + places * 4
    word = tl.load(raw, mask=places * 4 < rest, other=0).to(tl.int32)
    for number in tl.static_range(1, 4):
        byte = tl.load(raw + number, mask=places * 4 + number < rest, other=0)
        word = word | (byte.to(tl.int32) << (8 * number))
    return word


@triton.jit  # type: ignore[untyped-decorator]
def _joined(low, high, kind: tl.constexpr):  # type: ignore[no-untyped-def]
    """int32 words of two float32 each, cast."""
    if kind == _bfloat16:
        first = low.to(tl.bfloat16).to(tl.int16, bitcast=True)
        second = high.to(tl.bfloat16).to(tl.int16, bitcast=True)
    else:
        first = low.to(tl.float16).to(tl.int16, bitcast=True)
        second = high.to(tl.float16).to(tl.int16, bitcast=True)
    return (first.to(tl.int32) & 0xFFFF) | (second.to(tl.int32) << 16)
