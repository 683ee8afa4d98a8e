"""What the run page reads: the files of a run folder, whole or partial, as plain values. Absent files are empty."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tidemill.recorders.lines import heads, parse

__all__ = ["Numbers", "number_of", "read_json", "read_numbers", "select_lines"]

_MOST_STEPS = 4000
"""Steps whose numbers are read; of a longer run, every n-th."""


@dataclass(frozen=True, kw_only=True)
class Numbers:
    """metrics.jsonl by kind, each in order of steps. `steps` counts the steps that were recorded."""

    metrics: list[dict[str, Any]]
    timings: list[dict[str, Any]]
    evaluations: list[dict[str, Any]]
    steps: int


def read_json(path: Path) -> dict[str, Any]:
    """The object in the file; empty when it is absent, torn or something else."""
    try:
        value = json.loads(path.read_bytes(), parse_constant=lambda name: None)
    except (OSError, ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}


def read_numbers(run: Path) -> Numbers:
    """The numbers of a run, thinned when there are too many steps to draw."""
    path = run / "metrics.jsonl"
    steps = max((step + 1 for kind, step, _ in heads(path) if kind == "metrics"), default=0)
    stride = 1 + steps // _MOST_STEPS
    found: dict[str, list[dict[str, Any]]] = {"metrics": [], "timing": [], "eval": []}
    for kind, step, line in heads(path):
        if kind in found and (kind == "eval" or step % stride == 0 or step == steps - 1):
            value = parse(line)
            if value is not None:
                found[kind].append(value)
    return Numbers(metrics=found["metrics"], timings=found["timing"], evaluations=found["eval"], steps=steps)


def select_lines(path: Path, wanted: Mapping[str, frozenset[int] | None]) -> Iterator[dict[str, Any]]:
    """Lines of the wanted kinds; of a kind with a set, those of its steps only. The others are not parsed."""
    for kind, step, line in heads(path):
        if kind not in wanted:
            continue
        steps = wanted[kind]
        if steps is None or step in steps:
            value = parse(line)
            if value is not None:
                yield value


def number_of(value: Any) -> float | None:
    """The value as a float when it is a finite number, else None: what a person edited is not trusted."""
    known = isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) < 1e300
    return float(value) if known else None
