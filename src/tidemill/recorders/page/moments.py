"""What happened when: seconds of each phase over all steps, and every move of memory in some steps, to zoom into."""

import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from tidemill.recorders.page.curves import rounded
from tidemill.recorders.page.source import number_of, select_lines
from tidemill.recorders.timing import own_seconds

__all__ = ["moments"]

_STACK = 300
_FIRST, _LAST = 150, 650
Line = Mapping[str, Any]


def moments(run: Path, steps: int) -> dict[str, Any]:
    """`stack`: seconds by phase of at most 300 steps, spread evenly. `detail`: all of the first 150 and last 650."""
    stride = max(1, math.ceil(steps / _STACK))
    spread = frozenset(range(0, steps + 1, stride))
    detail = frozenset(range(min(_FIRST, steps + 1))) | frozenset(range(max(0, steps - _LAST), steps + 1))
    wanted = spread | detail
    phases: dict[int, list[Line]] = {}
    memory: dict[int, list[Line]] = {}
    for line in select_lines(run / "events.jsonl", {"phase": wanted, "memory": wanted}):
        if line["kind"] == "phase" and _is_phase(line):
            phases.setdefault(line["step"], []).append(line)
        elif line["kind"] == "memory" and _is_memory(line):
            memory.setdefault(line["step"], []).append(line)
    return {
        "stack": _stack({step: phases[step] for step in sorted(phases) if step in spread}, stride),
        "detail": _detail(
            {step: phases[step] for step in sorted(phases) if step in detail},
            {step: memory[step] for step in sorted(memory) if step in detail},
        ),
    }


def _is_phase(line: Line) -> bool:
    return isinstance(line.get("name"), str) and None not in (
        number_of(line.get("start")),
        number_of(line.get("seconds")),
    )


def _is_memory(line: Line) -> bool:
    return number_of(line.get("time")) is not None and all(isinstance(line.get(k), dict) for k in ("device", "host"))


def _in_background(name: str) -> bool:
    return name.startswith("save_") and name != "save_stall"


def _stack(phases: Mapping[int, list[Line]], stride: int) -> dict[str, Any]:
    rows: list[tuple[int, dict[str, float]]] = []
    for step, lines in phases.items():
        block = next((line for line in lines if line["name"] == "step"), None)
        if block is None:
            continue
        begin, end = block["start"], block["start"] + block["seconds"]
        intervals = [
            (line["name"], max(begin, line["start"]), min(end, line["start"] + line["seconds"]))
            for line in lines
            if line is not block and not _in_background(line["name"])
        ]
        own = own_seconds(interval for interval in intervals if interval[1] < interval[2])
        own["other"] = max(0.0, block["seconds"] - sum(own.values()))
        rows.append((step, own))
    totals: dict[str, float] = {}
    for _, own in rows:
        for name, seconds in own.items():
            totals[name] = totals.get(name, 0.0) + seconds
    names = sorted(totals, key=lambda name: (name == "other", -totals[name]))
    return {
        "stride": stride,
        "steps": [step for step, _ in rows],
        "names": names,
        "seconds": [[rounded(own.get(name, 0.0)) for _, own in rows] for name in names],
    }


def _detail(phases: Mapping[int, list[Line]], memory: Mapping[int, list[Line]]) -> dict[str, Any]:
    blocks = _blocks(phases)
    origin = blocks[0]["begin"] if blocks else 0.0
    shifts = _shifts(blocks)
    words = _Words()
    owners = _owners(line for lines in memory.values() for line in lines)
    spans = [
        [
            words[line["name"]],
            words[str(line.get("owner", ""))],
            _at(line["start"], origin, shifts[step]),
            rounded(line["seconds"]),
        ]
        for step, lines in phases.items()
        if step in shifts
        for line in lines
        if line["name"] != "step"
    ]
    levels = [
        [
            _at(line["time"], origin, shifts[step]),
            words[str(line.get("what", ""))],
            [int(number_of(line["device"].get(owner)) or 0) for owner in owners],
            [int(number_of(line["host"].get(owner)) or 0) for owner in owners],
            int(number_of(line.get("budget")) or 0),
        ]
        for step, lines in memory.items()
        if step in shifts
        for line in lines
    ]
    return {
        "steps": [
            [
                b["step"],
                _at(b["begin"], origin, shifts[b["step"]]),
                _at(b["end"], origin, shifts[b["step"]]),
                round(b["begin"]),
            ]
            for b in blocks
        ],
        "words": list(words),
        "owners": owners,
        "spans": sorted(spans, key=lambda span: span[2]),
        "levels": sorted(levels, key=lambda level: level[0]),
    }


class _Words(dict[str, int]):
    """Numbers words as they come."""

    def __missing__(self, word: str) -> int:
        self[word] = len(self)
        return self[word]


def _owners(lines: Iterable[Line]) -> list[str]:
    found = dict.fromkeys(owner for line in lines for side in (line["device"], line["host"]) for owner in side)
    known = [owner for owner in ("trainer", "engine") if owner in found]
    return known + [owner for owner in found if owner not in known]


def _blocks(phases: Mapping[int, list[Line]]) -> list[dict[str, Any]]:
    blocks = []
    for step, lines in phases.items():
        whole = [line for line in lines if line["name"] == "step"] or lines
        begin = min(line["start"] for line in whole)
        blocks.append({"step": step, "begin": begin, "end": max(line["start"] + line["seconds"] for line in whole)})
    return blocks


def _shifts(blocks: list[dict[str, Any]]) -> dict[int, float]:
    """Seconds by which each step is moved left, so that a night between two starts does not fill the picture."""
    shifts: dict[int, float] = {}
    shift = 0.0
    for i, block in enumerate(blocks):
        length = block["end"] - block["begin"]
        gap = block["begin"] - blocks[i - 1]["end"] if i else 0.0
        if gap < 0 or gap > max(1.0, 2 * length):
            shift += gap - length / 4
        shifts[block["step"]] = shift
    return shifts


def _at(time: float, origin: float, shift: float) -> float:
    return round(time - origin - shift, 5)
