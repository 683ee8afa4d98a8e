"""A picture of the comparison: sleep and wake of each arm and case as a share of what the bus allows."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure as Sheet

from benchmarks.figures import Figure

__all__ = ["draw"]

_COLORS = {"tidemill": "#0b6e8a", "tms-retained": "#c98a1b", "tms-default": "#b5532f", "per-tensor-cpu": "#8a8a8a"}
_NAMES = {
    "tidemill": "Tidemill",
    "tms-retained": "torch_memory_saver, backup retained",
    "tms-default": "torch_memory_saver, default",
    "per-tensor-cpu": ".cpu() and .to() of each tensor",
}
_GATE = 0.9
_WIDTH = 0.82

Values = Mapping[tuple[str, str, str, str], Figure]


def draw(figures: Sequence[Figure], file: Path) -> None:
    """One panel for sleep and one for wake; pale bars are first cycles, full ones medians. Arms that failed say so."""
    matplotlib.rcParams.update({"svg.hashsalt": "tidemill", "font.size": 9})
    shown: Values = {(f.metric, f.case, f.arm, f.cycle): f for f in figures if f.arm in _COLORS}
    cases = list(dict.fromkeys(f.case for f in figures if f.metric == "sleep_ratio"))
    arms = [arm for arm in _COLORS if any(f.arm == arm for f in figures)]
    sheet = Sheet(figsize=(max(6.0, 2.2 * len(cases) + 2), 5.6), layout="constrained")
    for axes, way in zip(sheet.subplots(2, 1, sharex=True), ("sleep", "wake"), strict=True):
        _panel(axes, shown, cases, arms, way)
    units = [f.unit for f in figures if f.metric == "sleep_ratio"]
    sheet.supylabel(f"rate, {units[0] if units else ''} of the same bytes")
    handles, labels = sheet.axes[0].get_legend_handles_labels()
    sheet.legend(handles, labels, loc="outside upper center", ncols=2, frameon=False)
    sheet.savefig(file, dpi=150, metadata={"Date": None} if file.suffix == ".svg" else None)


def _panel(axes: Axes, shown: Values, cases: Sequence[str], arms: Sequence[str], way: str) -> None:
    width = _WIDTH / max(1, 2 * len(arms))
    for number, arm in enumerate(arms):
        for step, cycle in enumerate(("first", "median")):
            place = (2 * number + step + 0.5) * width - _WIDTH / 2
            _bars(axes, shown, cases, arm=arm, metric=f"{way}_ratio", cycle=cycle, place=place, width=width)
    axes.axhline(1.0, color="black", linewidth=0.8)
    axes.axhline(_GATE, color="black", linewidth=0.6, linestyle=":")
    axes.set_title(way, loc="left", fontweight="bold")
    axes.set_xticks(range(len(cases)), cases)
    axes.set_ylim(bottom=0)
    axes.margins(y=0.14)
    axes.spines[["top", "right"]].set_visible(False)


def _bars(
    axes: Axes, shown: Values, cases: Sequence[str], *, arm: str, metric: str, cycle: str, place: float, width: float
) -> None:
    label = _NAMES[arm] if cycle == "median" else f"{_NAMES[arm]}: first cycle"
    found = [shown.get((metric, case, arm, cycle)) for case in cases]
    bars = axes.bar(
        [index + place for index in range(len(cases))],
        [figure.value if figure else 0.0 for figure in found],
        width=width * 0.92,
        color=_COLORS[arm],
        alpha=1.0 if cycle == "median" else 0.45,
        label=label,
    )
    texts = [_text(figure, ("failed", case, arm, "first") in shown) for figure, case in zip(found, cases, strict=True)]
    axes.bar_label(bars, texts, fontsize=7, padding=1, rotation=90)


def _text(figure: Figure | None, failed: bool) -> str:
    """Nothing for an arm that was not asked for in this case."""
    if figure is None:
        return "failed" if failed else ""
    return f"{figure.value:.2f}" if figure.verified else "failed"
