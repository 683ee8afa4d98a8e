"""The header of a safetensors file: made, and read back from hands that need not be friendly.

Data starts at a multiple of 4096 bytes (the header is padded with spaces, which the format allows). Tensors follow
each other without a gap, those with the widest elements first, so that each is aligned to its element. What is read is
checked in full before any of it is used: sizes, overlaps, holes, duplicates.
"""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tidemill.errors import CheckpointError

__all__ = ["ITEM_BYTES", "Header", "Slot", "fits", "lay_out", "pack_header", "parse_header"]

ALIGNMENT = 4096
LARGEST_HEADER = 100_000_000  # what the safetensors library itself refuses to exceed

ITEM_BYTES = {
    "BOOL": 1,
    "U8": 1,
    "I8": 1,
    "F8_E4M3": 1,
    "F8_E5M2": 1,
    "U16": 2,
    "I16": 2,
    "F16": 2,
    "BF16": 2,
    "U32": 4,
    "I32": 4,
    "F32": 4,
    "U64": 8,
    "I64": 8,
    "F64": 8,
}


@dataclass(frozen=True)
class Slot:
    """Where a tensor lies: bytes `[begin, end)` after the header."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


@dataclass(frozen=True)
class Header:
    """All tensors of a file in the order in which they lie, and the bytes before the first of them."""

    slots: tuple[Slot, ...]
    data_start: int
    metadata: Mapping[str, str]

    @property
    def file_bytes(self) -> int:
        """Size of the whole file."""
        return self.data_start + (self.slots[-1].end if self.slots else 0)


def lay_out(tensors: Mapping[str, tuple[str, tuple[int, ...]]]) -> tuple[Slot, ...]:
    """Slots for tensors given by dtype and shape, in an order that depends on nothing but them.

    Raises CheckpointError for a dtype that the format has not, or a name that it reserves.
    """
    for name, (dtype, _) in tensors.items():
        if dtype not in ITEM_BYTES:
            known = ", ".join(ITEM_BYTES)
            raise CheckpointError(f"cannot write tensor {name!r}: dtype {dtype!r} is not one of {known}")
        if name == "__metadata__":
            raise CheckpointError("cannot write a tensor named '__metadata__': safetensors reserves that name")
    slots, begin = [], 0
    for name in sorted(tensors, key=lambda name: (-ITEM_BYTES[tensors[name][0]], name)):
        dtype, shape = tensors[name]
        end = begin + ITEM_BYTES[dtype] * math.prod(shape)
        slots.append(Slot(name, dtype, shape, begin, end))
        begin = end
    return tuple(slots)


def pack_header(slots: tuple[Slot, ...], metadata: Mapping[str, str]) -> bytes:
    """The bytes before the data: length, JSON with sorted names, spaces up to the next multiple of 4096."""
    fields: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    for slot in sorted(slots, key=lambda slot: slot.name):
        fields[slot.name] = {"dtype": slot.dtype, "shape": list(slot.shape), "data_offsets": [slot.begin, slot.end]}
    text = json.dumps(fields, separators=(",", ":")).encode()
    size = -(-(8 + len(text)) // ALIGNMENT) * ALIGNMENT - 8
    if size > LARGEST_HEADER:
        raise CheckpointError(
            f"cannot write {len(slots)} tensors into one file: its header of {size} bytes would exceed the "
            f"{LARGEST_HEADER} bytes that safetensors allows"
        )
    return size.to_bytes(8, "little") + text.ljust(size)


def header_size(prefix: bytes, file_bytes: int) -> int:
    """Length of the JSON header that the first 8 bytes announce. Raises CheckpointError when it cannot be true."""
    if len(prefix) < 8:
        raise CheckpointError(f"has {file_bytes} bytes, fewer than a header takes")
    size = int.from_bytes(prefix[:8], "little")
    if size > LARGEST_HEADER or size + 8 > file_bytes:
        raise CheckpointError(f"announces a header of {size} bytes in a file of {file_bytes} bytes")
    return size


def parse_header(text: bytes, file_bytes: int) -> Header:
    """The header in `text`, JSON only. Raises CheckpointError, with a message that lacks the file's name."""
    try:
        fields = json.loads(text, object_pairs_hook=_without_duplicates)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"has a header that is not JSON ({error})") from None
    if not isinstance(fields, dict):
        raise CheckpointError("has a header that is not a JSON object")
    metadata = fields.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise CheckpointError("has metadata that is not a table of strings")
    slots = sorted((_slot(name, field) for name, field in fields.items()), key=lambda slot: (slot.begin, slot.end))
    header = Header(tuple(slots), 8 + len(text), metadata)
    _check_cover(header, file_bytes)
    return header


def fits(slots: Sequence[Slot]) -> bool:
    """Whether these are tensors of different names, one behind the other in this order and without a gap."""
    numbers = {type(number) for slot in slots for number in (slot.begin, slot.end, *slot.shape)}
    words = {type(word) for slot in slots for word in (slot.name, slot.dtype)}
    if not (numbers <= {int} and words <= {str}) or len({slot.name for slot in slots}) != len(slots):
        return False
    reached = 0
    for slot in slots:
        size = ITEM_BYTES.get(slot.dtype, -1) * math.prod(slot.shape)
        if slot.begin != reached or slot.end - reached != size or (slot.shape and min(slot.shape) < 0):
            return False
        reached = slot.end
    return True


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    fields = dict(pairs)
    if len(fields) != len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"the name {twice!r} is there twice")
    return fields


def _slot(name: str, field: object) -> Slot:
    if not isinstance(field, dict) or set(field) != {"dtype", "shape", "data_offsets"}:
        raise CheckpointError(f"describes tensor {name!r} by something else than dtype, shape and data_offsets")
    dtype, shape, offsets = field["dtype"], field["shape"], field["data_offsets"]
    if not isinstance(dtype, str) or dtype not in ITEM_BYTES:
        raise CheckpointError(f"has tensor {name!r} of unknown dtype {dtype!r}")
    if not _counts(shape) or not _counts(offsets) or len(offsets) != 2:
        raise CheckpointError(f"has tensor {name!r} with shape {shape!r} and offsets {offsets!r}")
    begin, end = offsets
    if end - begin != ITEM_BYTES[dtype] * math.prod(shape):
        raise CheckpointError(f"gives tensor {name!r} of shape {shape} and dtype {dtype} the range [{begin}, {end})")
    return Slot(name, dtype, tuple(shape), begin, end)


def _counts(value: object) -> bool:
    return isinstance(value, list) and all(type(item) is int and item >= 0 for item in value)


def _check_cover(header: Header, file_bytes: int) -> None:
    reached = 0
    for slot in header.slots:
        if slot.begin != reached:
            kind = "overlaps the one before it" if slot.begin < reached else "leaves a hole before it"
            raise CheckpointError(f"has tensor {slot.name!r} at [{slot.begin}, {slot.end}), which {kind}")
        reached = slot.end
    if header.file_bytes != file_bytes:
        raise CheckpointError(f"has {file_bytes} bytes where its header asks for {header.file_bytes}")
