"""What a checkpoint says of itself, as JSON values: parts, files, tensors, settings, identity, versions."""

import json
import math
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tidemill.checkpoint.catalog import Entry
from tidemill.checkpoint.changes import leaves
from tidemill.checkpoint.manifest import MANIFEST, STATE, FileEntry, Manifest, Slice
from tidemill.checkpoint.numbers import statistics_of
from tidemill.checkpoint.safetensors_header import ITEM_BYTES
from tidemill.checkpoint.small_files import read_text_file
from tidemill.checkpoint.stored import StoredCheckpoint
from tidemill.contracts.state import RunState
from tidemill.errors import CheckpointError

__all__ = ["described", "described_tensors", "with_statistics"]


def described(entry: Entry) -> dict[str, Any]:
    """All but the tensors, from manifest and state alone; `problems` names files that are missing or cut short.

    Raises CheckpointError when there is no manifest that can be read, NewerFormatError, and OSError.
    """
    manifest = Manifest.read(entry.path / MANIFEST)
    state = _state(entry.path)
    return {
        "path": str(entry.path),
        "step": manifest.step,
        "attempt": manifest.attempt,
        "time": manifest.time,
        "release": manifest.release,
        "format": manifest.format,
        "bytes": manifest.total_bytes,
        "problems": [text for file in manifest.files if (text := _problem(entry.path / file.name, file))],
        "state": state.get("run", {}),
        "parts": [_part(part, manifest, state.get("parts", {}).get(part, {})) for part in manifest.parts],
        "files": [{"name": file.name, "bytes": file.bytes, "slices": len(file.slices)} for file in manifest.files],
        "identity": dict(manifest.identity),
        "versions": dict(manifest.versions),
        "retention": dict(manifest.retention),
        "settings": _settings(manifest),
    }


def described_tensors(entry: Entry) -> list[dict[str, Any]]:
    """Every tensor with dtype, shape, bytes, and its slices: file, offset and shape. Raises as `described` does."""
    found: dict[tuple[str, str], list[tuple[FileEntry, Slice]]] = {}
    for file in Manifest.read(entry.path / MANIFEST).files:
        for piece in file.slices:
            found.setdefault((file.part, piece.name), []).append((file, piece))
    return [_tensor(part, name, held) for (part, name), held in sorted(found.items())]


def with_statistics(tensors: list[dict[str, Any]], stored: StoredCheckpoint) -> list[dict[str, Any]]:
    """The same with `min`, `max`, `mean`, `rms` and `nonfinite`, for which every tensor is read."""
    return [
        {**tensor, **asdict(statistics_of(stored.parts[tensor["part"]].tensors[tensor["name"]]))} for tensor in tensors
    ]


def _tensor(part: str, name: str, held: list[tuple[FileEntry, Slice]]) -> dict[str, Any]:
    first = held[0][1]
    return {
        "part": part,
        "name": name,
        "dtype": first.dtype,
        "shape": list(first.global_shape),
        "bytes": math.prod(first.global_shape) * ITEM_BYTES.get(first.dtype, 0),
        "slices": [
            {"file": file.name, "offset": list(piece.offset), "shape": list(piece.local_shape)} for file, piece in held
        ],
    }


def _part(part: str, manifest: Manifest, extra: Any) -> dict[str, Any]:
    files = [file for file in manifest.files if file.part == part]
    told = extra if isinstance(extra, Mapping) else {}
    return {
        "name": part,
        "files": len(files),
        "ranks": told.get("ranks", 1),
        "replicas": told.get("replicas", 1),
        "tensors": len({piece.name for file in files for piece in file.slices}),
        "slices": sum(len(file.slices) for file in files),
        "bytes": sum(file.bytes for file in files),
    }


def _settings(manifest: Manifest) -> dict[str, dict[str, Any]]:
    """By path: value and origin."""
    values, origins = manifest.settings.get("settings", {}), manifest.settings.get("origins", {})
    if not isinstance(values, Mapping) or not isinstance(origins, Mapping):
        return {}
    return {path: {"value": value, "origin": origins.get(path, "not known")} for path, value in leaves(values)}


def _state(folder: Path) -> dict[str, Any]:
    """state.json as far as it can be read: whether it is what was written is for a verification to say."""
    try:
        state = json.loads(read_text_file(folder / STATE))
        RunState.from_json(state["run"])
    except (FileNotFoundError, CheckpointError, RecursionError, KeyError, TypeError, ValueError):
        return {}
    return state if isinstance(state.get("parts"), dict) else {}


def _problem(path: Path, file: FileEntry) -> str:
    try:
        size = path.stat().st_size
    except FileNotFoundError:
        return f"{file.name} is missing"
    return "" if size == file.bytes else f"{file.name} has {size} of {file.bytes} bytes"
