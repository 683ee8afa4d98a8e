"""How often a run was started: a number that only rises, so that nothing written later can be taken for older."""

import re
from pathlib import Path

from tidemill.checkpoint.catalog import entries
from tidemill.checkpoint.durable import fsync_folder, write_durably
from tidemill.checkpoint.manifest import MANIFEST, Manifest
from tidemill.errors import CheckpointError

__all__ = ["next_attempt"]

_IN_NAME = re.compile(r"step-[0-9]+\.(?:aside-)?([0-9]+)(?:\.|$)")


def next_attempt(run_folder: Path) -> int:
    """One more than every attempt known of this run, durable before it is returned; 1 for the first.

    The holder of the run's lock calls it, once a start. A counter that was lost or garbled is made up for by the
    checkpoints and leftovers that bear attempts.
    """
    counter = run_folder / "attempt"
    attempt = max([_read(counter), *_seen(run_folder / "checkpoints")]) + 1
    fresh = run_folder / "attempt.tmp"
    try:
        fresh.unlink(missing_ok=True)
        write_durably(fresh, f"{attempt}\n".encode(), fault="attempt.write", fsync_fault="attempt.fsync-file")
        fresh.rename(counter)
        fsync_folder(run_folder)
    except OSError as error:
        raise CheckpointError(f"cannot count this start in {counter}: {error}; make the run folder writable") from error
    return attempt


def _read(counter: Path) -> int:
    try:
        return int(counter.read_text())
    except (FileNotFoundError, ValueError):
        return 0
    except OSError as error:
        raise CheckpointError(f"cannot count this start in {counter}: {error}; make it a readable file") from error


def _seen(folder: Path) -> list[int]:
    seen = [0]
    if not folder.is_dir():
        return seen
    seen += [int(match[1]) for path in folder.iterdir() if (match := _IN_NAME.match(path.name))]
    for entry in entries(folder):
        try:
            seen.append(Manifest.read(entry.path / MANIFEST).attempt)
        except (CheckpointError, OSError):
            continue  # a checkpoint that cannot be read is judged when it is restored, not here
    return seen
