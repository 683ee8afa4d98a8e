"""Bytes and seconds, written and read as people write them."""

import math
import re
import reprlib
from typing import NewType

__all__ = ["GIB", "KIB", "MIB", "Bytes", "Seconds", "format_bytes", "format_seconds", "parse_bytes"]

Bytes = NewType("Bytes", int)
Seconds = NewType("Seconds", float)

KIB, MIB, GIB, TIB = 1 << 10, 1 << 20, 1 << 30, 1 << 40
_FACTORS = {
    "": 1,
    "b": 1,
    "kib": KIB,
    "mib": MIB,
    "gib": GIB,
    "tib": TIB,
    "kb": 10**3,
    "mb": 10**6,
    "gb": 10**9,
    "tb": 10**12,
}


def format_bytes(count: float) -> str:
    """`2.0 GiB`; whole bytes below one KiB."""
    for name, factor in (("TiB", TIB), ("GiB", GIB), ("MiB", MIB), ("KiB", KIB)):
        if abs(count) >= factor:
            return f"{count / factor:.1f} {name}"
    return f"{int(count)} B"


def format_seconds(seconds: float) -> str:
    """`1 h 02 min`, `3 min 05 s`, `4.2 s`, `12 ms`."""
    if seconds < 1:
        return f"{seconds * 1e3:.0f} ms"
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest:02d} s"
    return f"{minutes // 60} h {minutes % 60:02d} min"


def parse_bytes(text: str) -> int:
    """Bytes from `"12 GiB"`, `"1.5GB"`, `"4096"`. Raises ValueError, saying what is accepted."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-zA-Z]*)\s*", text)
    if not match or match[2].lower() not in _FACTORS:
        raise ValueError(f"{text!r} is not a size; write a number and a unit, for example '12 GiB' or '500 MB'")
    count = float(match[1]) * _FACTORS[match[2].lower()]
    if math.isinf(count):
        raise ValueError(f"{reprlib.repr(text)} is larger than any memory; write for example '12 GiB'")
    return int(count)
