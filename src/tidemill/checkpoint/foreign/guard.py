"""Asks the child process that reads pickles. What it says is checked before it is used: it may have been taken over."""

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tidemill.errors import CheckpointError
from tidemill.rewards.worker import without_secrets

__all__ = ["ask_for_archives", "ask_for_metadata"]

_PATIENCE = 900.0  # seconds; the child's own limit of processor time is lower
_NOTHING_RAN = "nothing of it was run; do not trust this file"


def ask_for_metadata(path: Path) -> dict[str, Any]:
    """See `metadata.listed_tensors`. Raises CheckpointError."""
    return dict(_table(_ask({"metadata": str(path.absolute())}, path), path))


def ask_for_archives(places: Sequence[tuple[Path, int, int]]) -> list[dict[str, Any]]:
    """See `archive.archived_tensors`, of each file, first byte and length. Raises CheckpointError."""
    if not places:
        return []
    folder = places[0][0].parent
    found = _ask({"archives": [(str(path.absolute()), begin, length) for path, begin, length in places]}, folder)
    if not isinstance(found, list) or len(found) != len(places):
        raise _broken(folder)
    return [dict(_table(one, folder)) for one in found]


def _ask(request: Mapping[str, Any], path: Path) -> Any:
    try:
        done = subprocess.run(
            [sys.executable, "-P", "-m", "tidemill.checkpoint.foreign.child"],
            input=json.dumps(request).encode(),
            capture_output=True,
            timeout=_PATIENCE,
            env=without_secrets(os.environ),
            start_new_session=True,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise CheckpointError(
            f"cannot read {path}: it takes longer than any table of tensors; {_NOTHING_RAN}"
        ) from None
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: no process can be started to read it in ({error})") from error
    try:
        reply = json.loads(done.stdout)
    except (ValueError, RecursionError):
        raise CheckpointError(
            f"cannot read {path}: the process that read it ended with code {done.returncode}; {_NOTHING_RAN}"
        ) from None
    match reply:
        case {"result": found}:
            return found
        case {"refused": str(why)}:
            raise CheckpointError(f"cannot read {path}: it holds {why}; {_NOTHING_RAN}")
        case {"unreadable": str(why)}:
            raise CheckpointError(f"cannot read {path}: {why}")
    raise _broken(path)


def _table(value: Any, path: Path) -> Mapping[str, Any]:
    if not isinstance(value, dict) or not isinstance(value.get("tensors"), dict):
        raise _broken(path)
    return value


def _broken(path: Path) -> CheckpointError:
    return CheckpointError(f"cannot read {path}: the process that read it gave an answer of another form")
