"""summary.json, made from what the run folder recorded: it counts the whole run, whatever was killed on the way.

Lines that are torn or of another shape than ours do not count and do no harm.
"""

import resource
import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from tidemill.recorders.page.source import number_of, select_lines

__all__ = ["as_it_lies", "is_finished", "summarize"]

_WINDOW = 25
_FIGURES = {
    "steps",
    "finished",
    "seconds",
    "eval_first",
    "eval_last",
    "reward_first",
    "reward_last",
    "checkpoints",
    "sleeps",
    "wakes",
    "save_stall_seconds",
    "peak_host_bytes",
    "export",
}


def as_it_lies(summary: Mapping[str, Any], exports: Path) -> dict[str, Any]:
    """`summary`, with its export in the folder `exports`: the run's folder may have been moved, or copied, since."""
    target = summary.get("export")
    return {**summary, "export": str(exports / Path(target).name)} if isinstance(target, str) else dict(summary)


def is_finished(summary: Mapping[str, Any], *, steps: int, export: bool) -> bool:
    """Whether `summary`, as read from a run folder, says that nothing is left to do for `steps` and the `export`.

    One that a person edited, or another program, counts only if it is whole.
    """
    done, target = number_of(summary.get("steps")), summary.get("export")
    whole = summary.keys() >= _FIGURES and summary["finished"] is True and done is not None and done >= steps
    return whole and (not export or (isinstance(target, str) and Path(target).is_dir()))


def summarize(run: Path, *, steps: int, seconds: float, finished: bool, export: Path | None) -> dict[str, Any]:
    """The figures of the run in `run`, of which `steps` are known to be done, or as many as were recorded.

    `checkpoints` counts the steps that were ever durable, pruned ones too: each that was said to be, or resumed from.
    `reward_first` and `reward_last` are means over the first and last 25 reinforcement steps; `sleeps` and `wakes` are
    the trainer's; `save_stall_seconds` is what saves cost the loop; `seconds` is the wall time of the last start;
    `peak_host_bytes` the most that its process held.
    """
    metrics = list(select_lines(run / "metrics.jsonl", {"metrics": None, "eval": None}))
    rewards, evals = list(_numbers(metrics, "reward/mean")), list(_numbers(metrics, "eval/reward"))
    saved: set[float] = set()
    counts = {"sleep": 0, "wake_up": 0}
    stalled = 0.0
    for line in select_lines(run / "events.jsonl", {"phase": None, "checkpoint": None}):
        name = line.get("name")
        if line.get("status") in ("durable", "restored"):
            saved |= set(_numbers([line], "checkpoint_step"))
        elif name in ("sleep", "wake_up") and line.get("owner") == "trainer":
            counts[name] += 1
        elif name == "save_stall":
            stalled += sum(_numbers([line], "seconds"))
    return {
        "steps": max([steps, *(line["step"] + 1 for line in metrics if line["kind"] == "metrics")]),
        "finished": finished,
        "seconds": round(seconds, 3),
        "eval_first": evals[0] if evals else None,
        "eval_last": evals[-1] if evals else None,
        "reward_first": _mean(rewards[:_WINDOW]),
        "reward_last": _mean(rewards[-_WINDOW:]),
        "checkpoints": len(saved),
        "sleeps": counts["sleep"],
        "wakes": counts["wake_up"],
        "save_stall_seconds": round(stalled, 4),
        "peak_host_bytes": _peak_bytes(),
        "export": str(export) if export else None,
    }


def _numbers(lines: Iterable[Mapping[str, Any]], name: str) -> Iterator[float]:
    return (value for line in lines if (value := number_of(line.get(name))) is not None)


def _mean(values: list[float]) -> float | None:
    return sum(values) / len(values) if values else None


def _peak_bytes() -> int:
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
