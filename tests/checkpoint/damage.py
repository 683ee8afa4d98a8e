"""What may have become of a checkpoint's files."""

import json
from collections.abc import Callable
from pathlib import Path

from tidemill.checkpoint.manifest import MANIFEST, STATE, Manifest
from tidemill.checkpoint.safetensors_file import checksum

__all__ = ["DAMAGES", "without_part"]


def _missing(path: Path) -> None:
    path.unlink()


def _empty(path: Path) -> None:
    path.write_bytes(b"")


def _half(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def _one_bit(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


DAMAGES: dict[str, Callable[[Path], None]] = {
    "missing": _missing,
    "empty": _empty,
    "half of it": _half,
    "one bit flipped": _one_bit,
}
"""By name, what happens to one file."""


def without_part(checkpoint: Path, part: str) -> None:
    """As a save by a release that did not know the part would look: whole, but for that."""
    state = json.loads((checkpoint / STATE).read_bytes())
    del state["parts"][part]
    data = json.dumps(state).encode()
    (checkpoint / STATE).write_bytes(data)
    old = Manifest.read(checkpoint / MANIFEST)
    kept = [entry for entry in old.files if entry.part != part and entry.name != STATE]
    (was,) = (entry for entry in old.files if entry.name == STATE)
    fresh = type(was)(**vars(was) | {"bytes": len(data), "xxh3": checksum(data)})
    for entry in old.files:
        if entry.part == part:
            (checkpoint / entry.name).unlink()
    names = tuple(name for name in old.parts if name != part)
    manifest = Manifest(**vars(old) | {"files": (*kept, fresh), "parts": names})
    (checkpoint / MANIFEST).write_bytes(manifest.to_bytes())
