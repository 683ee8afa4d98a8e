"""A picture of the comparison: what a save costs the loop, how fast it is durable, what host memory it takes."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure as Sheet

from benchmarks.figures import Figure

__all__ = ["draw"]

_NAMES = {
    "tidemill-asleep": "Tidemill, the trainer sleeps",
    "tidemill-awake": "Tidemill, it stays awake",
    "dcp-async-pinned": "DCP async_save, pinned",
    "dcp-async": "DCP async_save",
    "dcp": "DCP save",
    "torch-save": "torch.save",
    "safetensors": "safetensors",
}
_OURS, _OTHERS = "#0b6e8a", "#8a8a8a"
_PANELS = {
    "stall": "added stall, s",
    "durable_ratio": "durable, rate by a raw write's",
    "load_ratio": "load, rate by a raw read's",
    "host_peak": "host memory by state",
}
# Where a goal is: a line at 1 says what the limit is.
_LIMITED = ("durable_ratio", "load_ratio", "host_peak")

Values = Mapping[tuple[str, str, str], Figure]


def draw(figures: Sequence[Figure], file: Path) -> None:
    """A row a case, a panel a metric, a bar an arm. Arms that failed say so."""
    matplotlib.rcParams.update({"svg.hashsalt": "tidemill", "font.size": 9})
    shown: Values = {(figure.case, figure.arm, figure.metric): figure for figure in figures}
    arms = [arm for arm in _NAMES if any(figure.arm == arm and figure.case != "export" for figure in figures)]
    cases = list(dict.fromkeys(figure.case for figure in figures if figure.arm in arms and figure.case != "export"))
    sheet = Sheet(figsize=(12, 1.2 + (0.6 + 0.3 * len(arms)) * max(1, len(cases))), layout="constrained")
    rows = sheet.subplots(max(1, len(cases)), len(_PANELS), squeeze=False, sharey=True)
    for case, row in zip(cases, rows, strict=False):
        for metric, axes in zip(_PANELS, row, strict=True):
            _panel(axes, shown, arms, case=case, metric=metric)
        row[0].set_ylabel(case, fontweight="bold")
    sheet.savefig(file, dpi=150, metadata={"Date": None} if file.suffix == ".svg" else None)


def _panel(axes: Axes, shown: Values, arms: Sequence[str], *, case: str, metric: str) -> None:
    found = [shown.get((case, arm, metric)) for arm in arms]
    bars = axes.barh(
        range(len(arms)),
        [max(0.0, figure.value) if figure else 0.0 for figure in found],
        color=[_OURS if arm.startswith("tidemill") else _OTHERS for arm in arms],
    )
    texts = [_text(figure, (case, arm, "failed") in shown) for figure, arm in zip(found, arms, strict=True)]
    axes.bar_label(bars, texts, fontsize=7, padding=2)
    axes.set_yticks(range(len(arms)), [_NAMES[arm] for arm in arms])
    axes.set_title(_PANELS[metric], fontsize=9)
    axes.margins(x=0.2)
    axes.spines[["top", "right"]].set_visible(False)
    if metric in _LIMITED:
        axes.axvline(1.0, color="black", linewidth=0.6, linestyle=":")
    if not axes.yaxis_inverted():
        axes.invert_yaxis()


def _text(figure: Figure | None, failed: bool) -> str:
    """Nothing for an arm that was not asked for in this case."""
    if figure is None:
        return "failed" if failed else ""
    return f"{figure.value:.3g}" if figure.verified else "failed"
