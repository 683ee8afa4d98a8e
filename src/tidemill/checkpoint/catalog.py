"""Which checkpoints there are, which one counts, and which are in the way.

"Latest" is derived: the newest complete and verified checkpoint, by the number in its name and never by a clock or a
pointer file. Names are `step-` and digits, padded or not; whatever else lies in the folder is ignored. A checkpoint
that is passed over because it is broken is renamed, so that its number is free again; it is never deleted.
"""

import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path

from tidemill.checkpoint.durable import fsync_folder, remove_tree
from tidemill.checkpoint.manifest import MANIFEST
from tidemill.checkpoint.stored import NO_LANDABLES, BrokenCheckpointError, StoredCheckpoint, read_checkpoint
from tidemill.contracts.events import Emit, Notice
from tidemill.contracts.landing import Landable
from tidemill.errors import CheckpointError
from tidemill.faults import skipped

__all__ = [
    "Entry",
    "Rejected",
    "attempt_folder",
    "checkpoint_name",
    "clean_leftovers",
    "entries",
    "newest",
    "problems_of",
    "set_aside",
    "trash_folder",
]

_NAME = re.compile(r"step-([0-9]+)")
_LEFTOVER = re.compile(r"step-[0-9]+\.[0-9]+(-[0-9]+)?\.(tmp|trash)")


@dataclass(frozen=True)
class Entry:
    """A folder that has a checkpoint's name."""

    step: int
    path: Path

    @property
    def complete(self) -> bool:
        """Whether it has a manifest. Only a verification says more."""
        return (self.path / MANIFEST).is_file()


@dataclass(frozen=True)
class Rejected:
    """A checkpoint that was passed over, and why."""

    entry: Entry
    reason: str


def checkpoint_name(step: int) -> str:
    """`step-00000050`."""
    return f"step-{step:08d}"


def attempt_folder(folder: Path, step: int, attempt: int) -> Path:
    """Where a checkpoint is written before it gets its name."""
    name = checkpoint_name(step)
    return folder / (name if skipped("checkpoint.own-folder") else f"{name}.{attempt}.tmp")


def trash_folder(entry: Entry, attempt: int) -> Path:
    """What a checkpoint is called while it is being deleted."""
    return _free(entry.path.with_name(f"{entry.path.name}.{attempt}.trash"))


def entries(folder: Path) -> list[Entry]:
    """All folders with a checkpoint's name, oldest step first; of two names for one step the padded one last."""
    if not folder.is_dir():
        return []
    found = [
        Entry(int(match[1]), path)
        for path in folder.iterdir()
        if (match := _NAME.fullmatch(path.name)) and path.is_dir()
    ]
    return sorted(found, key=lambda entry: (entry.step, entry.path.name == checkpoint_name(entry.step)))


def problems_of(
    entry: Entry,
    parts: Collection[str] = (),
    advance: Callable[[int], None] = lambda count: None,
    landables: Mapping[str, Landable] = NO_LANDABLES,
) -> tuple[StoredCheckpoint | None, str]:
    """The checkpoint when it is whole and holds `parts`, else None and what is wrong. `advance` hears of bytes read;
    `landables` are as `read_checkpoint` has them.

    Raises CheckpointError when that cannot be known: a later format, or a file that cannot be read.
    """
    try:
        stored = read_checkpoint(entry.path, step=entry.step, advance=advance, landables=landables)
    except BrokenCheckpointError as error:
        return None, str(error)
    except OSError as error:
        raise CheckpointError(
            f"cannot read {entry.path}: {error}; this does not mean that it is broken, so no older one is taken: "
            f"make it readable, or move it away"
        ) from error
    missing = sorted(set(parts) - set(stored.parts))
    if missing:
        return None, f"the part {', '.join(missing)} is missing"
    return stored, ""


def newest(
    folder: Path,
    *,
    parts: Collection[str] = (),
    walk_back: bool = True,
    landables: Mapping[str, Landable] = NO_LANDABLES,
) -> tuple[StoredCheckpoint | None, list[Rejected]]:
    """The newest whole checkpoint with all `parts`, and the later ones that were passed over, newest first.

    None only when there is no checkpoint at all: when all are broken, or the newest is and `walk_back` is False, it
    raises CheckpointError.
    """
    rejected: list[Rejected] = []
    for entry in reversed(entries(folder)):
        stored, reason = problems_of(entry, parts, landables=landables)
        if stored is not None:
            return stored, rejected
        rejected.append(Rejected(entry, reason))
        if not walk_back:
            raise CheckpointError(
                f"cannot resume from {entry.path}: {reason}; restore the file, or set checkpoint.walk_back = true to "
                f"take an older checkpoint"
            )
    if rejected:
        reasons = "; ".join(f"{item.entry.path.name}: {item.reason}" for item in rejected)
        raise CheckpointError(
            f"cannot resume from {folder}: none of its {len(rejected)} checkpoints is whole ({reasons}); restore the "
            f"files, or start another run.dir"
        )
    return None, rejected


def set_aside(rejected: list[Rejected], attempt: int) -> None:
    """Rename checkpoints that were passed over to `<name>.aside-<attempt>`, durably."""
    for item in rejected:
        path = item.entry.path
        path.rename(_free(path.with_name(f"{path.name}.aside-{attempt}")))
    for folder in {item.entry.path.parent for item in rejected}:
        fsync_folder(folder)


def clean_leftovers(folder: Path, emit: Emit) -> None:
    """Remove what earlier attempts left half written or half deleted. Only the holder of the run's lock may call it.

    What cannot be removed is a warning: it is never read.
    """
    for path in sorted(folder.iterdir()):
        if not _LEFTOVER.fullmatch(path.name):
            continue
        try:
            remove_tree(path)
        except OSError as error:
            emit(Notice(text=f"cannot remove {path}, left by an earlier attempt: {error}", level="warning"))


def _free(path: Path) -> Path:
    candidate, count = path, 1
    while candidate.exists() or candidate.is_symlink():
        candidate, count = path.with_name(f"{path.stem}-{count}{path.suffix}"), count + 1
    return candidate
