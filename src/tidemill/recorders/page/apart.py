"""The tokens of a run on which engine and trainer differed most, for the run page. All text is escaped."""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tidemill.recorders.lines import heads
from tidemill.recorders.page.picked import spread
from tidemill.recorders.page.source import number_of, select_lines
from tidemill.recorders.page.tables import text
from tidemill.recorders.sentences import number

__all__ = ["apart_rows"]

_STEPS = 2000
_SHOWN = 20


def apart_rows(run: Path) -> str:
    """A row a token, of the largest differences first. Of very many steps only some are looked at."""
    path = run / "samples.jsonl"
    steps = list(dict.fromkeys(step for kind, step, _ in heads(path) if kind == "apart"))
    lines = select_lines(path, {"apart": frozenset(spread(steps, _STEPS))})
    worst = sorted(lines, key=_difference, reverse=True)[:_SHOWN]
    return "".join(_row(line) for line in worst)


def _difference(line: Mapping[str, Any]) -> float:
    engine, trainer = number_of(line.get("engine")), number_of(line.get("trainer"))
    return math.inf if engine is None or trainer is None else abs(trainer - engine)


def _row(line: Mapping[str, Any]) -> str:
    position = number_of(line.get("position"))
    cells = (
        text(line["step"] + 1),
        text(line.get("trajectory", ""), 80),
        text("" if position is None else int(position) + 1),
        f"<code>{text(line.get('before', ''), 200)}<mark>{text(line.get('text', ''), 80)}</mark></code>",
        _logprob(line.get("engine")),
        _logprob(line.get("trainer")),
        text(number(_difference(line))),
    )
    return "<tr>" + "".join(f"<td>{cell}</td>" for cell in cells) + "</tr>"


def _logprob(value: Any) -> str:
    known = number_of(value)
    return "none" if known is None else text(f"{known:.4f}")
