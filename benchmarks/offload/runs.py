"""An arm in fresh processes, one a rank, watched from outside; and the figures of all its rounds."""

import statistics
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

from benchmarks.figures import Figure
from benchmarks.offload.arms import Settings
from benchmarks.offload.cycles import ASLEEP, BEGUN, Found, go_through
from benchmarks.outside import NoOnlooker, Onlooker, host_free
from benchmarks.processes import Child, Failed, one_gpu
from tidemill.residency.groups import open_rendezvous
from tidemill.units import GIB

__all__ = ["Eye", "Round", "figures_of", "limit_figures", "onlookers", "run_arm"]

Eye = Onlooker | NoOnlooker


@dataclass(frozen=True)
class Round:
    """What one rank found, and what was seen of it from outside, in bytes.

    `context` had the device less for its process with kernels alone; `left`, asleep, besides that; `left_process` is
    what the driver says that the process holds asleep, context included; `host` is what the host had less for the arm,
    asleep.
    """

    found: Found
    context: float
    left: float
    left_process: float
    host: float


@contextmanager
def onlookers(context: Any, device: str, ranks: int) -> Iterator[list[Eye]]:
    """One a GPU."""
    eyes: list[Eye] = [Onlooker(context, gpu) if device == "cuda" else NoOnlooker() for gpu in range(ranks)]
    try:
        yield eyes
    finally:
        for eye in eyes:
            eye.close()


def run_arm(context: Any, eyes: Sequence[Eye], arm: str, settings: Settings, cycles: int) -> list[Round]:
    """Every rank's round; none when one of them failed, which is told on standard error."""
    case, model, _ = settings
    barrier = context.Barrier(len(eyes))
    address = open_rendezvous("127.0.0.1") if len(eyes) > 1 else ""
    before = [eye.used() for eye in eyes]
    children: list[Child] = []
    try:
        for rank in range(len(eyes)):
            mine: Settings = (replace(case, rank=rank, ranks=len(eyes)), model, address)
            with one_gpu(rank):
                children.append(Child(context, go_through, arm, mine, cycles, barrier))
        empty = _seen(children, eyes, BEGUN)
        looks = [_seen(children, eyes, ASLEEP) for _ in range(2)]
        found = [child.answer() for child in children]
        return [
            Round(
                found=found[rank],
                context=empty[rank].used - before[rank],
                left=max(look[rank].used for look in looks) - empty[rank].used,
                left_process=max(look[rank].used_by for look in looks),
                host=(empty[rank].host_free - min(look[rank].host_free for look in looks)) / len(eyes),
            )
            for rank in range(len(eyes))
        ]
    except Failed as failure:
        print(f"{case.name}, {arm}: {failure}", file=sys.stderr)
        return []
    finally:
        for child in children:
            child.end()


@dataclass(frozen=True)
class _Look:
    used: float
    used_by: float
    host_free: float


def _seen(children: Sequence[Child], eyes: Sequence[Eye], when: str) -> list[_Look]:
    """All ranks, when all of them say that it is time; they go on afterwards."""
    for child in children:
        said = child.answer()
        if said != when:
            raise Failed(f"it said {said!r} when it should have said {when!r}")
    looks = [_Look(eye.used(), eye.used_by(child.pid), host_free()) for child, eye in zip(children, eyes, strict=True)]
    for child in children:
        child.pipe.send("seen")
    return looks


def figures_of(case: str, arm: str, rounds: Sequence[Round], device: str) -> list[Figure]:
    """Of all ranks and rounds of one arm; where ranks differ, of the slowest. One line that says so when it failed."""
    if not rounds:
        return [_figure(case, arm, "failed", 1.0, "yes or no", "first", verified=False)]
    verified = all(each.found.verified for each in rounds)
    found = [each.found for each in rounds]
    figures = [_figure(case, arm, "live", found[0].bytes / GIB, "GiB", "first", verified=verified)]
    figures.append(
        _figure(case, arm, "prepare", statistics.median(one.prepare for one in found), "s", "first", verified=verified)
    )
    for name, way in (("sleep", 0), ("wake", 1)):
        for cycle, pick in (("first", slice(0, 1)), ("median", slice(2, None))):
            ratios = [_ratio(one, name, way, pick) for one in found]
            seconds = [statistics.median(_seconds(one, name)[pick]) for one in found]
            figures.append(_figure(case, arm, f"{name}_ratio", min(ratios), _unit(device), cycle, verified=verified))
            figures.append(_figure(case, arm, name, max(seconds), "s", cycle, verified=verified))
    live = found[0].bytes
    figures.append(_figure(case, arm, "kept", max(one.kept for one in found) / GIB, "GiB", "first", verified=verified))
    if device == "cuda":
        for name in ("context", "left", "left_process"):
            seen = max(float(getattr(each, name)) for each in rounds)
            figures.append(_figure(case, arm, name, seen / GIB, "GiB", "first", verified=verified))
    # The driver's own allocations are no part of a process's resident memory; a machine on loan has no other user.
    peaks = [max(each.found.host_peak, each.host if device == "cuda" else 0.0) / live for each in rounds]
    figures.append(_figure(case, arm, "host_peak", max(peaks), "of live bytes", "first", verified=verified))
    return figures


def limit_figures(case: str, rounds: Sequence[Round]) -> list[Figure]:
    """The limit of a case: copies of all its processes, and how far it moved between before and after."""
    figures = []
    for name, way in (("sleep", 0), ("wake", 1)):
        rates = [each.found.bytes / s / 1e9 for each in rounds for copies in each.found.limits for s in copies[way]]
        drift = [statistics.median(a[way]) / statistics.median(b[way]) for a, b in (one.found.limits for one in rounds)]
        worst = max(max(ratio, 1 / ratio) - 1 for ratio in drift)
        median = statistics.median(rates)
        figures.append(_figure(case, "pinned-copy", f"{name}_rate", median, "GB/s", "median", verified=True))
        figures.append(_figure(case, "pinned-copy", f"{name}_drift", worst, "of itself", "median", verified=True))
    return figures


def _ratio(found: Found, name: str, way: int, pick: slice) -> float:
    limit = statistics.median([*found.limits[0][way], *found.limits[1][way]])
    return statistics.median(limit / seconds for seconds in _seconds(found, name)[pick])


def _seconds(found: Found, name: str) -> list[float]:
    return found.sleep if name == "sleep" else found.wake


def _unit(device: str) -> str:
    return "of pinned copy" if device == "cuda" else "of plain copy"


def _figure(case: str, arm: str, metric: str, value: float, unit: str, cycle: str, *, verified: bool) -> Figure:
    return Figure(
        benchmark="offload", arm=arm, case=case, metric=metric, value=value, unit=unit, cycle=cycle, verified=verified
    )
