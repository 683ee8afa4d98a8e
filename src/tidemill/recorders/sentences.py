"""The lines of the console, as pure functions of numbers."""

import math
from collections.abc import Mapping

from tidemill.contracts.events import CheckpointEvent
from tidemill.units import format_bytes, format_seconds

__all__ = ["SIDE", "checkpoint_line", "evaluation_line", "number", "step_line"]

# With one update a step the ratio is 1, and loss and KL say nothing: they are shown where they do.
_SHOWN = {"reward": "reward/mean", "answer tokens": "rollout/tokens_mean", "grad norm": "policy/grad_norm"}
_SHOWN_IF_ANY = {"kl": "policy/kl", "groups without signal": "rollout/groups_without_signal"}
_SHOWN_IN_WARM_UP = {"loss": "policy/loss", "grad norm": "policy/grad_norm"}

SIDE = frozenset({"eval/failed", "eval/abstained", "eval/truncated", "eval/tokens_mean"})
"""What an evaluation also counts, besides what it is about."""


def number(value: float) -> str:
    """Three digits that count, two below 0.1: `0.714`, `0.00031`, `1.23k`, `3.4M`; `nan` stays what it is."""
    if not math.isfinite(value):
        return str(value)
    for factor, letter in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= factor * 0.9995:
            return f"{value / factor:.3g}{letter}"
    return f"{value:.{3 if abs(value) >= 0.1 else 2}g}"


def step_line(head: str, values: Mapping[str, float], checkpoint: str) -> str:
    """`step 120/400  reward 0.71  answer 9  grad norm 1.2  tokens 1.2k/s  0.11 s  checkpoint 100 durable`."""
    shown = _SHOWN if "reward/scored" in values else _SHOWN_IN_WARM_UP
    words = [head]
    words += [f"{word} {number(values[name])}" for word, name in shown.items() if name in values]
    words += [f"{word} {number(values[name])}" for word, name in _SHOWN_IF_ANY.items() if values.get(name)]
    seconds = values.get("time/step", 0.0)
    if seconds > 0 and "batch/tokens" in values:
        words.append(f"tokens {number(values['batch/tokens'] / seconds)}/s")
    if seconds > 0:
        words.append(f"{seconds:.2f} s" if seconds < 10 else format_seconds(seconds))
    return "  ".join([*words, checkpoint] if checkpoint else words)


def evaluation_line(step: int, values: Mapping[str, float], before: Mapping[str, float]) -> str:
    """`eval at step 150: exact match 0.84 (was 0.61)`. What is only counted on the side is told when there is any."""
    parts = []
    for name, value in values.items():
        if name == "eval/tokens_mean" or (name in SIDE and value == 0):
            continue
        words = f"{name.removeprefix('eval/').replace('_', ' ')} {number(value)}"
        parts.append(f"{words} (was {number(before[name])})" if name in before else words)
    return f"eval at step {step}: {', '.join(parts)}"


def checkpoint_line(event: CheckpointEvent) -> str:
    """`checkpoint 100 durable (5.0 MiB in 0.2 s)`, or what went wrong."""
    size = f" ({format_bytes(event.bytes)} in {format_seconds(event.seconds)})" if event.bytes else ""
    return f"checkpoint {event.step} {event.status}{size}" + (f": {event.reason}" if event.reason else "")
