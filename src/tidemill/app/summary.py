"""summary.json, made from what the run folder recorded: it counts the whole run, whatever was killed on the way."""

import json
import resource
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

__all__ = ["summarize"]

_WINDOW = 25


def summarize(run: Path, *, steps: int, seconds: float, finished: bool, export: Path | None) -> dict[str, Any]:
    """The figures of the run in `run`.

    `reward_first` and `reward_last` are means over the first and last 25 reinforcement steps; `sleeps` and `wakes` are
    the trainer's; `save_stall_seconds` is what saves cost the loop; `seconds` is the wall time of the last start;
    `peak_host_bytes` the most that its process held.
    """
    metrics = list(_lines(run / "metrics.jsonl"))
    events = list(_lines(run / "events.jsonl"))
    rewards = [line["reward/mean"] for line in metrics if line.get("reward/mean") is not None]
    evals = [line["eval/reward"] for line in metrics if line.get("eval/reward") is not None]
    phases = [line for line in events if line.get("kind") == "phase"]
    return {
        "steps": steps,
        "finished": finished,
        "seconds": round(seconds, 3),
        "eval_first": evals[0] if evals else None,
        "eval_last": evals[-1] if evals else None,
        "reward_first": _mean(rewards[:_WINDOW]),
        "reward_last": _mean(rewards[-_WINDOW:]),
        "checkpoints": len({e["checkpoint_step"] for e in events if e.get("status") == "durable"}),
        "sleeps": sum(p["name"] == "sleep" and p["owner"] == "trainer" for p in phases),
        "wakes": sum(p["name"] == "wake_up" and p["owner"] == "trainer" for p in phases),
        "save_stall_seconds": round(sum(p["seconds"] for p in phases if p["name"] == "save_stall"), 4),
        "peak_host_bytes": _peak_bytes(),
        "export": str(export) if export else None,
    }


def _mean(values: list[float]) -> float | None:
    return sum(values) / len(values) if values else None


def _peak_bytes() -> int:
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def _lines(path: Path) -> Iterator[dict[str, Any]]:
    if not path.exists():
        return
    with path.open("rb") as file:
        for line in file:
            if line.endswith(b"\n"):
                yield json.loads(line)
