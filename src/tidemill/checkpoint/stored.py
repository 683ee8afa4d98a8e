"""One checkpoint folder, read and checked in full: what restores, exports and verifications look through.

Nothing of it is used before every size and every checksum in its manifest has been found true, and the pieces of
every tensor have been found to make the whole. What is wrong is said of the files by name. A file that cannot be read
for other reasons (permission, a failing disk) is an OSError: that says nothing about the checkpoint.
"""

import itertools
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from tidemill.checkpoint.cover import cover_problems
from tidemill.checkpoint.manifest import FORMAT_OF_BLOCKS, MANIFEST, STATE, FileEntry, Manifest, shard_file
from tidemill.checkpoint.safetensors_file import checksum
from tidemill.checkpoint.small_files import read_text_file
from tidemill.checkpoint.stored_tensor import FilePiece, StoredTensor
from tidemill.checkpoint.verify import file_problems, size_problem
from tidemill.contracts.checkpoint import Saved, SavedTensor
from tidemill.contracts.landing import NOWHERE, Landable
from tidemill.contracts.state import RunState
from tidemill.errors import CheckpointError

__all__ = ["NO_LANDABLES", "BrokenCheckpointError", "StoredCheckpoint", "read_checkpoint", "weights_of"]

MODEL_PREFIX = "model/"
_SHOWN = 20
NO_LANDABLES: Mapping[str, Landable] = MappingProxyType({})


class BrokenCheckpointError(CheckpointError):
    """A checkpoint that is there and cannot be trusted; the message says what is wrong, without its name."""


@dataclass(frozen=True, kw_only=True, eq=False)
class StoredCheckpoint:
    """A verified checkpoint. Its tensors are read from its files when they are asked for."""

    path: Path
    manifest: Manifest
    state: RunState
    parts: Mapping[str, Saved]


def read_checkpoint(
    path: Path,
    *,
    step: int,
    advance: Callable[[int], None] = lambda count: None,
    landables: Mapping[str, Landable] = NO_LANDABLES,
) -> StoredCheckpoint:
    """The checkpoint in folder `path`, whose name says `step`; `advance` is told of bytes verified.

    Tensors of parts in `landables` are read into their memory on the way. Several threads verify. Raises
    BrokenCheckpointError with everything that is wrong, NewerFormatError, and OSError.
    """
    manifest = _manifest(path, step)
    listed = {part: [entry for entry in manifest.files if entry.part == part] for part in manifest.parts}
    problems = [text for part, entries in listed.items() if (text := _missing(path, part, entries, manifest))]
    there = [entry for entries in listed.values() for entry in entries if (path / entry.name).exists()]
    landings = {part: landables[part].landing() for part in listed if part in landables}
    problems += file_problems(path, there, advance, landings)
    state: dict[str, Any] = {}
    try:
        state = _read_state(path / STATE, manifest)
    except BrokenCheckpointError as error:
        problems.append(str(error))
    if not problems:
        for entries in listed.values():
            problems += cover_problems((entry.name, entry.specs) for entry in entries)
    if problems:
        raise BrokenCheckpointError("; ".join(problems))
    try:
        run = RunState.from_json(state["run"])
        parts = {
            part: Saved(
                tensors=_tensors(path, entries),
                extra=_extra(state["parts"], part),
                landing=landings.get(part, NOWHERE),
            )
            for part, entries in listed.items()
        }
    except (KeyError, TypeError, ValueError) as error:
        raise BrokenCheckpointError(f"{STATE} lacks or garbles a field ({error})") from None
    return StoredCheckpoint(path=path, manifest=manifest, state=run, parts=parts)


def _extra(extras: Mapping[str, Any], part: str) -> Mapping[str, Any]:
    if not isinstance(extras[part], dict):
        raise ValueError(f"what it has of {part} is no table")
    return dict(extras[part])


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
    bare = [entry.name for entry in manifest.files if entry.name != STATE and not entry.blocks]
    if bare and manifest.format >= FORMAT_OF_BLOCKS:
        raise BrokenCheckpointError(f"{MANIFEST} has no checksums of {', '.join(bare)}")
    if manifest.step != step:
        raise BrokenCheckpointError(f"{MANIFEST} is that of step {manifest.step}")
    return manifest


def _missing(path: Path, part: str, entries: Sequence[FileEntry], manifest: Manifest) -> str:
    """Which of the files of `part` are not there."""
    count = manifest.shards(part)
    listed = {entry.name for entry in entries}
    total = max(count, len(listed))
    gone = [name for name in sorted(listed) if not (path / name).exists()]
    lacking = len(gone) + total - len(listed)
    if not lacking:
        return ""
    # As many as a manifest says that it has may be more than anybody wants to read.
    names = (shard_file(part, index, count) for index in range(count))
    gone = sorted([*gone, *itertools.islice((name for name in names if name not in listed), _SHOWN)])[:_SHOWN]
    more = f" and {lacking - len(gone)} more" if lacking > len(gone) else ""
    text = f"{', '.join(gone)}{more} {'is' if lacking == 1 else 'are'} missing"
    return f"{part} has {total - lacking} of {total} shards, {text}" if total > 1 else text


def _read_state(path: Path, manifest: Manifest) -> dict[str, Any]:
    entry = next((entry for entry in manifest.files if entry.name == STATE), None)
    if entry is None:
        raise BrokenCheckpointError(f"{MANIFEST} does not name {STATE}")
    if wrong := size_problem(path, entry):
        raise BrokenCheckpointError(wrong)
    try:
        data = read_text_file(path)
    except CheckpointError as error:
        raise BrokenCheckpointError(str(error)) from None
    if checksum(data) != entry.xxh3:
        raise BrokenCheckpointError(f"the checksum of {STATE} differs")
    try:
        state: dict[str, Any] = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise BrokenCheckpointError(f"{STATE} is not JSON ({error})") from None
    parts = state.get("parts") if isinstance(state, dict) else None
    if not isinstance(parts, dict) or sorted(parts) != sorted(manifest.parts):
        raise BrokenCheckpointError(f"{STATE} and {MANIFEST} name different parts")
    return state


def _tensors(path: Path, entries: Sequence[FileEntry]) -> dict[str, SavedTensor]:
    """Whole tensors of the pieces in the files of one part."""
    found: dict[str, StoredTensor] = {}
    for entry in entries:
        file = path / entry.name  # one object for all its pieces, so that it is sent once
        for one in entry.slices:
            piece = FilePiece(file, one.begin, one.end, one.offset, one.local_shape)
            before = found.get(one.name)
            pieces = (piece,) if before is None else (*before.pieces, piece)
            found[one.name] = StoredTensor(one.dtype, one.global_shape, pieces)
    return dict(found)
