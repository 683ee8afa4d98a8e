"""JSON lines files that a process may have died over: reading them in spite of it, and cutting them."""

import json
import os
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from tidemill.checkpoint.durable import fsync_folder

__all__ = ["cut_lines", "heads", "parse"]

_HEAD = re.compile(rb'\{"kind":"(\w+)","step":(\d+)[,}]')


def parse(line: bytes) -> dict[str, Any] | None:
    """The object in a line that is whole; None for anything else. A bare NaN or Infinity counts as null."""
    if not line.endswith(b"\n"):
        return None
    try:
        value = json.loads(line, parse_constant=lambda name: None)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def heads(path: Path) -> Iterator[tuple[str, int, bytes]]:
    """Kind, step and bytes of each whole line, without parsing the rest of it; nothing when there is no file."""
    if not path.is_file():
        return
    with path.open("rb") as file:
        for line in file:
            head = _HEAD.match(line)
            if head and line.endswith(b"\n"):
                yield head[1].decode(), int(head[2]), line


def cut_lines(path: Path, stays: Callable[[Mapping[str, Any]], bool]) -> None:
    """Keep the whole lines for which `stays` is true, in order, durably; a line that is torn or not ours goes.

    The file is replaced by a new one and the folder fsynced, so that a crash leaves the old or the new file. A file
    from which nothing goes is not touched.
    """
    if not path.is_file():
        return
    new = path.with_name(path.name + ".new")
    gone = 0
    with path.open("rb") as old, new.open("wb") as kept:
        for line in old:
            value = parse(line)
            if value is not None and isinstance(value.get("step"), int) and stays(value):
                kept.write(line)
            else:
                gone += 1
        kept.flush()
        os.fsync(kept.fileno())
    if not gone:
        new.unlink()
        return
    new.replace(path)
    fsync_folder(path.parent)
