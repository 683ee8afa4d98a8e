"""Retention as a run meets it: the best beside the last, and never none, however slow the disk is."""

from collections.abc import Callable
from typing import Any

import pytest

from tidemill.checkpoint.catalog import entries, problems_of
from tidemill.faults import armed, calling

MakeRig = Callable[..., Any]


class Scores:
    """What was recorded for `keep_best`, as the test goes on."""

    def __init__(self) -> None:
        self.found: dict[int, float] = {}

    def values(self) -> dict[int, float]:
        """Given."""
        return self.found

    def names(self) -> list[str]:
        """One."""
        return ["reward/mean"]


@pytest.mark.parametrize("mode", ["async", "sync"])
def test_the_best_is_kept_beside_the_last_across_starts(make_rig: MakeRig, mode: str) -> None:
    scores = Scores()
    options = {"every": 1, "keep_last": 1, "keep_best": "reward/mean", "measured": scores, "mode": mode}
    first = make_rig(**options)
    first.restore()
    for step in range(1, 6):
        first.run(step)
        scores.found[step] = [0, 0.1, 0.9, 0.2, 0.3, 0.9][step] if step < 5 else float("-inf")
    assert first.names() == ["step-00000002", "step-00000005"]
    second = make_rig(attempt=2, **options)
    second.restore()
    assert second.names() == ["step-00000002", "step-00000005"] and second.warnings() == []
    scores.found[5] = 0.9
    second.run(6)
    assert second.names() == ["step-00000005", "step-00000006"]


@pytest.mark.parametrize("best", ["", "reward/mean"])
def test_keep_one_with_a_writer_slower_than_the_interval_never_leaves_none(make_rig: MakeRig, best: str) -> None:
    """B04, B06: saves queue; at every rename of the retention a newer whole checkpoint is there."""
    seen: list[list[int]] = []
    rig = make_rig(every=1, keep_last=1, mode="async", keep_best=best, measured=Scores())
    rig.restore()

    def look() -> None:
        seen.append([entry.step for entry in entries(rig.folder) if problems_of(entry)[0] is not None])

    with calling("checkpoint.retention.rename", look), armed("checkpoint.fsync-manifest=delay:0.05"):
        rig.run(6)
    assert seen == [[step, step + 1] for step in range(1, 6)]
    assert rig.statuses("durable") == [1, 2, 3, 4, 5, 6] and rig.statuses("failed") == []
    assert rig.names() == ["step-00000006"]
