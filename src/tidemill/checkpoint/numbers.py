"""Bytes of tensors as numbers, in blocks, without torch: what describes and compares them.

Everything is computed in float64 (integers beyond 2**53 are rounded), one block of bounded size at a time.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

from tidemill.checkpoint.safetensors_header import ITEM_BYTES
from tidemill.contracts.checkpoint import SavedTensor

__all__ = ["Change", "Statistics", "Values", "change_of", "in_blocks", "statistics_of", "values_of"]

Values = np.ndarray[tuple[int], np.dtype[np.float64]]
Box = tuple[tuple[int, ...], tuple[int, ...]]

_BLOCK_BYTES = 8 << 20
_PLAIN = {
    "BOOL": np.uint8,
    "U8": np.uint8,
    "I8": np.int8,
    "U16": np.uint16,
    "I16": np.int16,
    "F16": np.float16,
    "U32": np.uint32,
    "I32": np.int32,
    "F32": np.float32,
    "U64": np.uint64,
    "I64": np.int64,
    "F64": np.float64,
}


@dataclass(frozen=True, kw_only=True)
class Statistics:
    """Over the finite elements; all four are NaN when there is none. `nonfinite` counts NaN and infinities."""

    min: float
    max: float
    mean: float
    rms: float
    nonfinite: int


@dataclass(frozen=True, kw_only=True)
class Change:
    """How far two tensors of one shape are apart. `elements` differ, in their bits where the dtype is the same.

    `largest` and `mean` are of absolute differences, over all elements; `relative` is the norm of the difference over
    that of the first, infinite where that is zero. An element that is NaN or infinite in one of them only makes all
    three infinite.
    """

    elements: int
    largest: float
    mean: float
    relative: float


def values_of(data: memoryview, dtype: str) -> Values:
    """The elements, flat. Raises KeyError for a dtype that safetensors files of ours have not."""
    with np.errstate(invalid="ignore"):  # a signalling NaN is one like others
        if dtype in _PLAIN:
            return np.frombuffer(data, dtype=_PLAIN[dtype]).astype(np.float64)
        if dtype == "BF16":
            wide = np.frombuffer(data, dtype=np.uint16).astype(np.uint32) << 16
            return wide.view(np.float32).astype(np.float64)
        if dtype == "F8_E5M2":
            return (np.frombuffer(data, dtype=np.uint8).astype(np.uint16) << 8).view(np.float16).astype(np.float64)
    return _E4M3[np.frombuffer(data, dtype={"F8_E4M3": np.uint8}[dtype])]


def in_blocks(dtype: str, shape: tuple[int, ...], limit: int = _BLOCK_BYTES) -> Iterator[Box]:
    """Boxes that cover a tensor, in row-major order, each of at most `limit` bytes where its last dimension allows.

    None for a tensor without elements.
    """
    if math.prod(shape) == 0:
        return
    if math.prod(shape) * ITEM_BYTES[dtype] <= limit or not shape:
        yield (0,) * len(shape), shape
        return
    width = math.prod(shape[1:]) * ITEM_BYTES[dtype]
    if width > limit and len(shape) > 1:
        for row in range(shape[0]):
            for offset, box in in_blocks(dtype, shape[1:], limit):
                yield (row, *offset), (1, *box)
        return
    step = max(1, limit // width)
    for row in range(0, shape[0], step):
        yield (row, *(0 for _ in shape[1:])), (min(step, shape[0] - row), *shape[1:])


def statistics_of(tensor: SavedTensor) -> Statistics:
    """Reads it once."""
    low, high, total, squares, count, bad = math.inf, -math.inf, 0.0, 0.0, 0, 0
    for offset, shape in in_blocks(tensor.dtype, tensor.shape):
        values = values_of(tensor.read(offset, shape), tensor.dtype)
        finite = values[np.isfinite(values)]
        bad += len(values) - len(finite)
        if not len(finite):
            continue
        low, high = min(low, float(finite.min())), max(high, float(finite.max()))
        total, squares, count = total + float(finite.sum()), squares + _squares(finite), count + len(finite)
    if not count:
        return Statistics(min=math.nan, max=math.nan, mean=math.nan, rms=math.nan, nonfinite=bad)
    return Statistics(min=low, max=high, mean=total / count, rms=math.sqrt(squares / count), nonfinite=bad)


def change_of(before: SavedTensor, after: SavedTensor, advance: Callable[[int], None]) -> Change | None:
    """How two tensors of one shape differ; None when they do not. `advance` is told of the bytes of `before` read."""
    same_dtype = before.dtype == after.dtype
    elements, largest, total, squares, norm = 0, 0.0, 0.0, 0.0, 0.0
    wider = max(before.dtype, after.dtype, key=ITEM_BYTES.__getitem__)
    for offset, shape in in_blocks(wider, before.shape):
        one, other = before.read(offset, shape), after.read(offset, shape)
        advance(len(one))
        values = values_of(one, before.dtype)
        with np.errstate(invalid="ignore", over="ignore"):
            norm += _squares(values[np.isfinite(values)])
            if same_dtype and one == other:
                continue
            changed = values_of(other, after.dtype)
            gaps = np.abs(changed - values)
            gaps[(changed == values) | (np.isnan(changed) & np.isnan(values))] = 0.0
            gaps[np.isnan(gaps)] = np.inf
            elements += _differing(one, other, before.dtype) if same_dtype else int(np.count_nonzero(gaps))
            largest, total = max(largest, float(gaps.max())), total + float(gaps.sum())
            squares += _squares(gaps)
    if elements == 0 and (same_dtype or largest == 0):
        return None
    relative = math.sqrt(squares) / math.sqrt(norm) if norm else (math.inf if squares else 0.0)
    return Change(elements=elements, largest=largest, mean=total / math.prod(before.shape), relative=relative)


def _differing(one: memoryview, other: memoryview, dtype: str) -> int:
    width = ITEM_BYTES[dtype]
    pair = [np.frombuffer(data, dtype=np.uint8).reshape(-1, width) for data in (one, other)]
    return int(np.count_nonzero((pair[0] != pair[1]).any(axis=1)))


def _squares(values: Values) -> float:
    return float(np.dot(values, values))


def _e4m3(code: int) -> float:
    """The value of a byte: 4 bits of exponent (bias 7), 3 of mantissa, no infinity, one NaN a sign."""
    sign, exponent, mantissa = -1.0 if code & 0x80 else 1.0, (code >> 3) & 15, code & 7
    if code & 0x7F == 0x7F:
        return math.nan
    return sign * (math.ldexp(mantissa, -9) if exponent == 0 else math.ldexp(8 + mantissa, exponent - 10))


_E4M3 = np.array([_e4m3(code) for code in range(256)])
