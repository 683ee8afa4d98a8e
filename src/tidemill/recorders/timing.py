"""Where the seconds and bytes of one step went, from the events within its block."""

import bisect
import itertools
from collections.abc import Iterable, Mapping

from tidemill.contracts.events import Memory, PhaseDone, Transition, WeightsCompared

__all__ = ["StepTiming", "covered", "is_timing", "own_seconds"]

Interval = tuple[str, float, float]
"""Name, start and end, seconds."""


def is_timing(values: Mapping[str, float]) -> bool:
    """Whether these are of this machine or process, which no resume reproduces: `time/*`, `memory/*` and the like."""
    return all(name.startswith(("time/", "memory/", "weights/", "engine/")) for name in values)


def own_seconds(intervals: Iterable[Interval]) -> dict[str, float]:
    """Seconds of each name, where a moment within several intervals counts for the one that began last.

    So a phase inside another is taken out of it, and the sum is the time that anything was going on.
    """
    known = sorted(intervals, key=lambda interval: interval[1])
    cuts = sorted({moment for _, start, end in known for moment in (start, end)})
    seconds: dict[str, float] = {}
    for left, right in itertools.pairwise(cuts):
        latest = bisect.bisect_right(known, left, key=lambda interval: interval[1])
        inner = next((known[i] for i in range(latest - 1, -1, -1) if known[i][2] >= right), None)
        if inner is not None:
            seconds[inner[0]] = seconds.get(inner[0], 0.0) + right - left
    return seconds


def covered(intervals: Iterable[Interval]) -> float:
    """Seconds in which at least one of the intervals was under way."""
    total, reached = 0.0, float("-inf")
    for _, start, end in sorted(intervals, key=lambda interval: interval[1]):
        total += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return total


class StepTiming:
    """Collects the phases and the memory of a block; holds nothing of an earlier block but who holds which bytes."""

    def __init__(self) -> None:
        self._open = False
        self._began = 0.0
        self._thread = 0
        self._sums: dict[str, float] = {}
        self._intervals: list[Interval] = []
        self._held: dict[str, int] = {}
        self._peaks: dict[str, int] = {}
        self._left: dict[str, int] = {}
        self._verified: list[float] = []
        self._crossed, self._within, self._within_seconds = 0, 0, 0.0

    def begin(self, began: float, thread: int) -> None:
        """A block begins at Unix time `began`; phases of other threads are background to it."""
        self._open, self._began, self._thread = True, began, thread
        self._sums, self._intervals, self._peaks = {}, [], dict(self._held)
        self._left = {}
        self._verified = []
        self._crossed, self._within, self._within_seconds = 0, 0, 0.0

    def abandon(self) -> None:
        """The block was left by an exception."""
        self._open = False

    def add_phase(self, event: PhaseDone, thread: int) -> None:
        """A phase ended on `thread`; ignored outside a block."""
        if not self._open:
            return
        self._sums[event.name] = self._sums.get(event.name, 0.0) + event.seconds
        if thread == self._thread:
            self._intervals.append((event.name, max(event.start, self._began), event.start + event.seconds))

    def add_memory(self, event: Memory) -> None:
        """Bytes changed hands."""
        held = {f"memory/device/{owner}": count for owner, count in event.device.items()}
        held |= {f"memory/host/{owner}": count for owner, count in event.host.items()}
        gone = dict.fromkeys(self._held, 0)
        self._held = held
        for name, count in {**gone, **held}.items():
            self._peaks[name] = max(self._peaks.get(name, 0), count)

    def add_transition(self, event: Transition) -> None:
        """A tenant slept or woke."""
        self._crossed += event.copied + event.beside
        if event.copied:
            self._within += event.copied
            self._within_seconds += event.seconds
        if event.waited:
            self._sums["wait_for_save"] = self._sums.get("wait_for_save", 0.0) + event.waited
        for holder, count in event.left.items():
            self._left[holder] = max(self._left.get(holder, 0), count)

    def add_compared(self, event: WeightsCompared) -> None:
        """Weights were handed over."""
        self._verified.append(event.compared / event.total if event.total else 1.0)

    def end(self, seconds: float) -> dict[str, float]:
        """`time/<name>` summed by name, `time/step`, `time/other` (in no phase), `memory/*` at the step's peak.

        `memory/left/<holder>` is what no tenant holds on the device behind a transition; `memory/copied` are bytes that
        crossed between device and host for transitions, also beside other work; `memory/gbps` is how fast those were
        that crossed within them. `weights/verified` is the share of the weights that was compared after a hand-over,
        the least of the step.
        """
        self._open = False
        values = {f"time/{name}": total for name, total in self._sums.items()}
        values["time/step"] = seconds
        values["time/other"] = max(0.0, seconds - covered(self._intervals))
        values |= {f"memory/left/{holder}": float(count) for holder, count in self._left.items()}
        if self._verified:
            values["weights/verified"] = min(self._verified)
        if self._crossed:
            values["memory/copied"] = float(self._crossed)
        if self._within_seconds > 0:
            values["memory/gbps"] = self._within / self._within_seconds / 1e9
        return values | {name: float(count) for name, count in self._peaks.items()}
