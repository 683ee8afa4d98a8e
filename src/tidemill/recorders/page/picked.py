"""Samples for the run page: some steps spread over the run, every answer of theirs that was kept."""

from pathlib import Path
from typing import Any

from tidemill.recorders.lines import heads
from tidemill.recorders.page.source import number_of, select_lines
from tidemill.recorders.text import cut, visible

__all__ = ["picked", "spread"]

_STEPS = 40
_CHARACTERS = 900_000
"""Characters of text in all: the page stays small enough to mail."""


def picked(run: Path) -> list[dict[str, Any]]:
    """Samples in order of steps, text made visible and cut so that all of them fit."""
    path = run / "samples.jsonl"
    steps: dict[str, dict[int, None]] = {"train": {}, "eval": {}}
    for kind, step, _ in heads(path):
        if kind in steps:
            steps[kind][step] = None
    wanted = {kind: frozenset(spread(list(found), _STEPS)) for kind, found in steps.items()}
    lines = list(select_lines(path, wanted))
    limit = max(200, min(3000, _CHARACTERS // max(1, 2 * len(lines))))
    return [_sample(line, limit) for line in lines]


def spread(steps: list[int], most: int) -> list[int]:
    """At most so many of them, evenly, the first and the last among them."""
    if len(steps) <= most:
        return steps
    return [steps[round(i * (len(steps) - 1) / (most - 1))] for i in range(most)]


def _sample(line: dict[str, Any], limit: int) -> dict[str, Any]:
    def text(name: str, most: int = limit) -> str:
        return visible(cut(str(line.get(name, "")), most))

    return {
        "kind": line["kind"],
        "step": line["step"],
        "prompt": text("prompt"),
        "answer": text("answer"),
        "label": text("label", 400),
        "reward": number_of(line.get("reward")),
        "status": text("status", 40),
        "reason": text("reason", 200),
        "stop": text("stop", 40),
        "tokens": number_of(line.get("tokens")),
    }
