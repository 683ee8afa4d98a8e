"""What a path on the command line stands for: a run's checkpoints, or one of them."""

import contextlib
import os
import re
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from tidemill.checkpoint.catalog import Entry, Rejected, entries, problems_of
from tidemill.checkpoint.manifest import MANIFEST, Manifest, NewerFormatError
from tidemill.checkpoint.stored import StoredCheckpoint
from tidemill.cli.progress import bar
from tidemill.cli.streams import say
from tidemill.errors import CheckpointError, ConfigError

__all__ = ["Found", "find", "find_run", "of_step", "only_or_newest", "read_entry", "read_newest", "tensor_bytes"]

_NAME = re.compile(r"step-([0-9]+)(\..+)?")


@dataclass(frozen=True, kw_only=True)
class Found:
    """`chosen` is what was named, oldest first, and `siblings` all checkpoints of their folder.

    `numbers` is where the run recorded its numbers; there need not be such a file.
    """

    given: Path
    chosen: tuple[Entry, ...]
    siblings: tuple[Entry, ...]
    numbers: Path


def find(given: Path) -> Found:
    """A run's folder, its folder of checkpoints, or one checkpoint, through links too. Raises ConfigError."""
    if not os.path.isdir(given):  # noqa: PTH112 (unlike Path, it answers for any text)
        what = "is no folder" if os.path.exists(given) else "is not there"  # noqa: PTH110
        raise ConfigError(f"{given} {what}; name a run's folder (run.dir), or one checkpoint in it")
    path = given.absolute()
    if (path / "checkpoints").is_dir():
        return _run(given, path)
    step = _step_of(path)
    if step is not None:
        beside = _entries(path.parent)
        mine = next((entry for entry in beside if entry.path.name == path.name), Entry(step, given))
        return Found(given=given, chosen=(mine,), siblings=beside, numbers=_numbers(path.parent))
    inside = _entries(path)
    if inside:
        return Found(given=given, chosen=inside, siblings=inside, numbers=_numbers(path))
    raise ConfigError(f"no checkpoints in {given / 'checkpoints'}; name a run's folder (run.dir)")


def find_run(given: Path) -> Found:
    """As `find`, of a run's folder alone. Raises ConfigError for anything else."""
    path = given.absolute()
    if os.path.isdir(given) and (path / "checkpoints").is_dir():  # noqa: PTH112
        return _run(given, path)
    found = find(given)
    raise ConfigError(f"{given} holds {len(found.chosen)} checkpoints, but is no run's folder; name that (run.dir)")


def of_step(found: Found, step: int | None) -> Found:
    """The checkpoint of that step alone; all that were named for None. Raises ConfigError."""
    if step is None:
        return found
    of = [entry for entry in found.chosen if entry.step == step]
    if not of:
        steps = ", ".join(str(entry.step) for entry in found.chosen)
        raise ConfigError(f"no checkpoint of step {step} in {found.given}; there {_are(found.chosen)} {steps}")
    return Found(given=found.given, chosen=(of[-1],), siblings=found.siblings, numbers=found.numbers)


def only_or_newest(found: Found) -> Entry:
    """The one that was named, else the newest that has a manifest. Raises CheckpointError."""
    if len(found.chosen) == 1:
        return found.chosen[0]
    complete = [entry for entry in found.chosen if entry.complete]
    if not complete:
        raise CheckpointError(f"none of the {len(found.chosen)} checkpoints in {found.given} has a {MANIFEST}")
    return complete[-1]


def read_entry(entry: Entry, doing: str) -> StoredCheckpoint:
    """The checkpoint, verified. Raises CheckpointError that says what cannot be done."""
    stored, problem = _verified(entry)
    if stored is None:
        raise CheckpointError(f"cannot {doing} {entry.path}: {problem}; take another step")
    return stored


def read_newest(found: Found, doing: str) -> StoredCheckpoint:
    """The newest whole one of those named, with a warning for each that is passed over. Raises CheckpointError."""
    if len(found.chosen) == 1:
        return read_entry(found.chosen[0], doing)
    rejected: list[Rejected] = []
    for entry in reversed(found.chosen):
        stored, problem = _verified(entry)
        if stored is not None:
            for item in rejected:
                text = f"{item.entry.path.name} is not whole and is passed over: {item.reason}"
                say(f"warning: {text}", sys.stderr)
            return stored
        rejected.append(Rejected(entry, problem))
    reasons = "; ".join(f"{item.entry.path.name}: {item.reason}" for item in rejected)
    raise CheckpointError(f"cannot {doing} {found.given}: none of its {len(rejected)} checkpoints is whole ({reasons})")


def tensor_bytes(entries: Iterable[Entry]) -> int:
    """Of their files of tensors, for a bar: what cannot be seen, or went meanwhile, does not count."""
    total = 0
    for entry in entries:
        with contextlib.suppress(OSError):
            total += sum(path.stat().st_size for path in entry.path.glob("*.safetensors"))
    return total


def _verified(entry: Entry) -> tuple[StoredCheckpoint | None, str]:
    total = tensor_bytes([entry])
    with bar(f"verifying {entry.path.name}", total) as advance:
        return problems_of(entry, advance=advance)


def _run(given: Path, path: Path) -> Found:
    inside = _entries(given / "checkpoints")
    if not inside:
        raise ConfigError(f"no checkpoints in {given / 'checkpoints'}; the run has not saved any yet")
    return Found(given=given, chosen=inside, siblings=inside, numbers=path / "metrics.jsonl")


def _entries(folder: Path) -> tuple[Entry, ...]:
    try:
        return tuple(entries(folder))
    except OSError as error:
        raise ConfigError(f"cannot look into {folder}: {error.strerror}; make it readable") from error


def _numbers(folder: Path) -> Path:
    """Of the run whose checkpoints lie in `folder`."""
    return folder.parent / "metrics.jsonl"


def _step_of(path: Path) -> int | None:
    """The step of a checkpoint's folder: by its manifest, whatever the folder is called now, else by its name."""
    try:
        return Manifest.read(path / MANIFEST).step
    except NewerFormatError:
        raise
    except (CheckpointError, OSError):
        names = (path.name, path.resolve().name)
        return next((int(match[1]) for name in names if (match := _NAME.fullmatch(name))), None)


def _are(chosen: Sequence[Entry]) -> str:
    return "is" if len(chosen) == 1 else "are"
