"""One recorded number of a run, read back from metrics.jsonl, also while the run goes on writing there."""

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from tidemill.recorders.lines import parse

__all__ = ["RecordedNumber"]

_NO_NUMBERS = {"kind", "step", "nonfinite"}


class RecordedNumber:
    """Implements checkpoint.retention.Measured: `name` as a line of `path` has it.

    A line's step counts the updates that were done before it, so that its numbers are about the weights of the
    checkpoint of that step. What was read once is read again only when the file was cut.
    """

    def __init__(self, path: Path, name: str) -> None:
        self._path, self._name = path, name
        self._place = (0, 0)
        self._found: dict[int, float] = {}

    def values(self) -> Mapping[int, float]:
        """By step, without those that are no finite number; of two lines for one step the later. Raises OSError."""
        needle = json.dumps(self._name).encode() + b":"
        for line in self._lines():
            fields = parse(line) if needle in line and self._name not in _NO_NUMBERS else None
            if fields is not None and isinstance(fields.get("step"), int):
                self._take(fields["step"], fields.get(self._name))
        return dict(self._found)

    def names(self) -> Sequence[str]:
        """All that have a number somewhere in the file, sorted. Raises OSError."""
        found: set[str] = set()
        if self._path.is_file():
            with self._path.open("rb") as file:
                for line in file:
                    numbers = (parse(line) or {}).items()
                    found |= {name for name, value in numbers if name not in _NO_NUMBERS and _finite(value) is not None}
        return sorted(found)

    def _take(self, step: int, value: Any) -> None:
        self._found.pop(step, None)
        number = _finite(value)
        if number is not None:
            self._found[step] = number

    def _lines(self) -> Iterator[bytes]:
        """Whole lines that were not read before."""
        if not self._path.is_file():
            self._place, self._found = (0, 0), {}
            return
        with self._path.open("rb") as file:
            inode = self._path.stat().st_ino
            known, offset = self._place
            if inode != known or offset > self._path.stat().st_size:
                offset, self._found = 0, {}
            file.seek(offset)
            for line in file:
                if not line.endswith(b"\n"):
                    break
                offset += len(line)
                yield line
            self._place = (inode, offset)


def _finite(value: Any) -> float | None:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        number = float(value)
    except OverflowError:
        return None
    return number if math.isfinite(number) else None
