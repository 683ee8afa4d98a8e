"""One checkpoint folder, read and checked in full: what restores, exports and verifications look through.

Nothing of it is used before every size and every checksum in its manifest has been found true. What is wrong is said
of the files by name. A file that cannot be read for other reasons (permission, a failing disk) is an OSError: that
says nothing about the checkpoint.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tidemill.checkpoint.manifest import MANIFEST, STATE, FileEntry, Manifest, Slice
from tidemill.checkpoint.safetensors_file import TensorFile, checksum
from tidemill.contracts.checkpoint import Saved, SavedTensor, TensorBytes
from tidemill.contracts.state import RunState
from tidemill.errors import CheckpointError

__all__ = ["BrokenCheckpointError", "StoredCheckpoint", "read_checkpoint", "weights_of"]

MODEL_PREFIX = "model/"


class BrokenCheckpointError(CheckpointError):
    """A checkpoint that is there and cannot be trusted; the message says what is wrong, without its name."""


@dataclass(frozen=True, kw_only=True, eq=False)
class StoredCheckpoint:
    """A verified checkpoint. Tensors are read-only views of its mapped files."""

    path: Path
    manifest: Manifest
    state: RunState
    parts: Mapping[str, Saved]


def read_checkpoint(path: Path, *, step: int, advance: Callable[[int], None] = lambda count: None) -> StoredCheckpoint:
    """The checkpoint in folder `path`, whose name says `step`; `advance` is told of bytes verified.

    Raises BrokenCheckpointError with everything that is wrong, NewerFormatError, CheckpointError when its tensors are
    in pieces that this release cannot join, and OSError.
    """
    manifest = _manifest(path, step)
    problems: list[str] = []
    tensors: dict[str, dict[str, TensorBytes]] = {name: {} for name in manifest.parts}
    state: dict[str, Any] = {}
    for entry in manifest.files:
        try:
            if entry.name == STATE:
                state = _read_state(path / STATE, entry, manifest)
            else:
                tensors[entry.part].update(_read_tensors(path / entry.name, entry, advance))
        except BrokenCheckpointError as error:
            problems.append(str(error))
    if not state and not problems:
        problems.append(f"{MANIFEST} does not name {STATE}")
    if problems:
        raise BrokenCheckpointError("; ".join(problems))
    try:
        run = RunState.from_json(state["run"])
        parts = {name: Saved(tensors=tensors[name], extra=state["parts"][name]) for name in manifest.parts}
    except (KeyError, TypeError) as error:
        raise BrokenCheckpointError(f"{STATE} lacks or garbles a field ({error})") from None
    return StoredCheckpoint(path=path, manifest=manifest, state=run, parts=parts)


def weights_of(stored: StoredCheckpoint) -> dict[str, SavedTensor]:
    """The policy's weights by Hugging Face name. Raises CheckpointError when no part holds any."""
    weights = {
        name.removeprefix(MODEL_PREFIX): tensor
        for saved in stored.parts.values()
        for name, tensor in saved.tensors.items()
        if name.startswith(MODEL_PREFIX)
    }
    if not weights:
        raise CheckpointError(f"cannot take weights from {stored.path}: no tensor in it is named {MODEL_PREFIX}...")
    return weights


def _manifest(path: Path, step: int) -> Manifest:
    try:
        manifest = Manifest.read(path / MANIFEST)
    except CheckpointError as error:
        if type(error) is not CheckpointError:
            raise
        raise BrokenCheckpointError(str(error)) from None
    unknown = sorted({entry.part for entry in manifest.files if entry.name != STATE} - set(manifest.parts))
    if unknown:
        raise BrokenCheckpointError(f"{MANIFEST} has files of {', '.join(unknown)}, which is no part of it")
    if manifest.step != step:
        raise BrokenCheckpointError(f"{MANIFEST} is that of step {manifest.step}")
    return manifest


def _checked_size(path: Path, entry: FileEntry) -> None:
    try:
        size = path.stat().st_size
    except FileNotFoundError:
        raise BrokenCheckpointError(f"{entry.name} is missing") from None
    if size != entry.bytes:
        raise BrokenCheckpointError(f"{entry.name} has {size} of {entry.bytes} bytes")


def _read_state(path: Path, entry: FileEntry, manifest: Manifest) -> dict[str, Any]:
    _checked_size(path, entry)
    data = path.read_bytes()
    if checksum(data) != entry.xxh3:
        raise BrokenCheckpointError(f"the checksum of {STATE} differs")
    try:
        state: dict[str, Any] = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise BrokenCheckpointError(f"{STATE} is not JSON ({error})") from None
    if not isinstance(state, dict) or sorted(state.get("parts", ())) != sorted(manifest.parts):
        raise BrokenCheckpointError(f"{STATE} and {MANIFEST} name different parts")
    return state


def _read_tensors(path: Path, entry: FileEntry, advance: Callable[[int], None]) -> dict[str, TensorBytes]:
    _checked_size(path, entry)
    try:
        file = TensorFile(path)
    except CheckpointError as error:
        raise BrokenCheckpointError(str(error)) from None
    start = file.header.data_start
    found = {(slot.name, slot.dtype, slot.shape, start + slot.begin, start + slot.end) for slot in file.header.slots}
    listed = {(piece.name, piece.dtype, piece.local_shape, piece.begin, piece.end) for piece in entry.slices}
    if found != listed:
        raise BrokenCheckpointError(f"{entry.name} and {MANIFEST} describe different tensors")
    tensors = file.tensors()
    for piece in entry.slices:
        if checksum(tensors[piece.name].data, advance) != piece.xxh3:
            raise BrokenCheckpointError(f"the checksum of {piece.name} in {entry.name} differs")
        _check_whole(path, piece)
    return tensors


def _check_whole(path: Path, piece: Slice) -> None:
    if piece.local_shape != piece.global_shape:
        raise CheckpointError(
            f"cannot read {path.parent}: {piece.name} of shape {list(piece.global_shape)} is saved in pieces of "
            f"{list(piece.local_shape)} by several ranks, and this release runs one rank; use the release that wrote it"
        )
