"""Curves of the run page: which numbers are drawn together, and how many points of them are enough."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from tidemill.recorders.page.source import Numbers, number_of
from tidemill.recorders.sentences import SIDE

__all__ = ["curves", "result_name", "rounded", "thin"]

_POINTS = 600
_CHARTS = (
    ("loss", "Loss", ("policy/loss",), ""),
    ("gradient", "Gradient norm", ("policy/grad_norm",), ""),
    ("kl", "KL to the sampling policy", ("policy/kl",), "nats"),
    ("mismatch", "Log-prob mismatch", ("mismatch/logprob_abs_mean", "mismatch/logprob_abs_p99"), "nats"),
    ("length", "Answer length", ("rollout/tokens_mean",), "tokens"),
    ("rate", "Learning rate", ("policy/lr",), ""),
)


def curves(numbers: Numbers, warm_up: int) -> list[dict[str, Any]]:
    """Charts in order: reward with evaluation, the known ones, then one for each other number (`more`)."""
    lines = numbers.metrics
    drawn = ["reward/mean"]
    charts = [_reward(numbers)]
    names = sorted({name for line in lines for name in line} - {"kind", "step", "nonfinite"})
    learning = [line for line in lines if line["step"] >= warm_up]
    if warm_up and learning:
        warm = _series("policy/loss", [line for line in lines if line["step"] < warm_up])
        charts.append(_chart("warm-up", "Loss of the warm-up", [warm]))
    for key, title, candidates, unit in _CHARTS:
        present = [name for name in candidates if name in names]
        drawn += present
        if key == "kl" and not any(line.get(name) for name in present for line in lines):
            continue  # one update a step: the policy is the one that sampled, a flat line says nothing
        # The two phases minimise different things: on one axis the second would be a flat line.
        series = [_series(name, learning or lines if key == "loss" else lines) for name in present]
        charts.append(_chart(key, title, series, unit=unit, log=key in ("rate", "gradient"), smooth=key != "rate"))
    measured = {name for line in numbers.evaluations for name in line} - {"kind", "step", "nonfinite"}
    for name in sorted(measured - {result_name(numbers.evaluations)}):
        title = "Evaluation: " + name.removeprefix("eval/").replace("_", " ")
        charts.append(_chart(name, title, [_series(name, numbers.evaluations, points=True)], more=name in SIDE))
    charts += [_chart(name, name, [_series(name, lines)], more=True) for name in names if name not in drawn]
    return [chart for chart in charts if any(series["x"] for series in chart["series"])]


def result_name(evaluations: Sequence[Mapping[str, Any]]) -> str:
    """The number that an evaluation is about: its first that is not on the side; `eval/reward` when there is none."""
    names = (name for line in evaluations for name in line if name.startswith("eval/") and name not in SIDE)
    return next(names, "eval/reward")


def _reward(numbers: Numbers) -> dict[str, Any]:
    result = result_name(numbers.evaluations)
    series = [
        _series("reward/mean", numbers.metrics, label="reward, mean of a step"),
        _series(
            result, numbers.evaluations, points=True, label=result.replace("eval/", "evaluation, ").replace("_", " ")
        ),
    ]
    return _chart("reward", "Reward", [one for one in series if one["x"]], wide=True)


def _chart(key: str, title: str, series: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
    return {
        "key": key,
        "title": title,
        "series": series,
        "unit": "",
        "wide": False,
        "more": False,
        "log": False,
        "smooth": True,
        **more,
    }


def _series(name: str, lines: Sequence[Mapping[str, Any]], *, points: bool = False, label: str = "") -> dict[str, Any]:
    pairs = [(line["step"], value) for line in lines if (value := number_of(line.get(name))) is not None]
    # The number of a step is that of the update that it ends with; an evaluation looks at the weights before it.
    shifted = [(step if points else step + 1, value) for step, value in pairs]
    x, y = thin(shifted, _POINTS)
    return {"name": label or name, "x": x, "y": y, "points": points}


def thin(pairs: Sequence[tuple[int, float]], most: int) -> tuple[list[int], list[float]]:
    """At most `most` points: means over runs of neighbours, at the last step of each."""
    size = max(1, math.ceil(len(pairs) / most))
    chunks = [pairs[start : start + size] for start in range(0, len(pairs), size)]
    return [chunk[-1][0] for chunk in chunks], [rounded(sum(y for _, y in chunk) / len(chunk)) for chunk in chunks]


def rounded(value: float) -> float:
    """Five digits are more than a screen shows."""
    return float(f"{value:.5g}")
