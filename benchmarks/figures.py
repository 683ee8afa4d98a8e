"""The one shape in which every benchmark says what it found: JSON lines that can be compared, and a table."""

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

__all__ = ["Figure", "Lines", "report"]


@dataclass(frozen=True, kw_only=True)
class Figure:
    """One JSON line. `cycle` is `first` or `median`; `verified` says that the contents were right at the end."""

    benchmark: str
    arm: str
    case: str
    metric: str
    value: float
    unit: str
    cycle: str
    verified: bool

    def line(self) -> str:
        """As JSON, the value with five digits; what could not be measured is null."""
        value = float(f"{self.value:.5g}") if math.isfinite(self.value) else None
        return json.dumps({**vars(self), "value": value})


class Lines:
    """Lines as they come, on standard output and in `file`, if there is one: what is cut short leaves what it had.

    Raises SystemExit, at once, when the file cannot be written.
    """

    def __init__(self, file: Path | None) -> None:
        self._file = file
        self.figures: list[Figure] = []
        if file is not None:
            try:
                file.write_text("")
            except OSError as error:
                raise SystemExit(f"cannot write to {file}: {error.strerror}") from error

    def tell(self, figures: Sequence[Figure]) -> None:
        """Print and keep them."""
        self.figures += figures
        lines = "".join(figure.line() + "\n" for figure in figures)
        print(lines, end="", flush=True)
        if self._file is not None:
            with self._file.open("a") as file:
                file.write(lines)

    def table(self) -> str:
        """Of all, for people."""
        return _table(self.figures)


def report(figures: Sequence[Figure], file: Path | None) -> None:
    """Print all lines and then a table; write the lines to `file` too, if there is one."""
    lines = Lines(file)
    lines.tell(figures)
    print(lines.table())


def _table(figures: Sequence[Figure]) -> str:
    """A row a metric, the two cycles side by side."""
    cells: dict[tuple[str, str, str, str], dict[str, float]] = {}
    wrong: set[tuple[str, str]] = set()
    for figure in figures:
        cells.setdefault((figure.case, figure.arm, figure.metric, figure.unit), {})[figure.cycle] = figure.value
        if not figure.verified:
            wrong.add((figure.case, figure.arm))
    rows = [f"{'case':<12} {'arm':<16} {'metric':<20} {'first':>10} {'median':>10}  unit"]
    for (case, arm, metric, unit), values in cells.items():
        first, median = (f"{values[cycle]:.4g}" if cycle in values else "" for cycle in ("first", "median"))
        failed = "  FAILED" if (case, arm) in wrong else ""
        rows.append(f"{case:<12} {arm:<16} {metric:<20} {first:>10} {median:>10}  {unit}{failed}")
    return "\n".join(rows)
