"""An arm in a fresh process, watched from outside; and the figures of all its rounds."""

import statistics
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.checkpoint.arms import is_ours
from benchmarks.checkpoint.cycles import BEGUN, LAPS, SAVED, Found, go_through
from benchmarks.figures import Figure
from benchmarks.offload.cases import Case
from benchmarks.outside import host_free
from benchmarks.processes import Child, Failed, one_gpu
from tidemill.units import GIB

__all__ = ["Round", "figure", "figures_of", "limit_figures", "run_arm"]

_LOOK = 0.05


@dataclass(frozen=True)
class Round:
    """What the process found, and what the host had less for it at most, in bytes: pinned and shared memory too."""

    found: Found
    host: float


def run_arm(context: Any, arm: str, case: Case, folder: Path) -> list[Round]:
    """The round of one fresh process on the first GPU; none when it failed, which is told on standard error."""
    with tempfile.TemporaryDirectory(prefix=f"{arm}-", dir=folder) as own, one_gpu(0):
        child = Child(context, go_through, arm, case, Path(own))
        try:
            _heard(child, BEGUN)
            before = host_free()
            with _least_free() as least:
                child.pipe.send("seen")
                _heard(child, SAVED)
            child.pipe.send("seen")
            return [Round(child.answer(), before - least[0])]
        except Failed as failure:
            print(f"{case.name}, {arm}: {failure}", file=sys.stderr)
            return []
        finally:
            child.end()


def _heard(child: Child, when: str) -> None:
    if (said := child.answer()) != when:
        raise Failed(f"it said {said!r} when it should have said {when!r}")


@contextmanager
def _least_free() -> Iterator[list[float]]:
    """The least bytes that the host had free, looked at twenty times a second."""
    least, over = [host_free()], threading.Event()

    def look() -> None:
        while not over.wait(_LOOK):
            least[0] = min(least[0], host_free())

    watcher = threading.Thread(target=look, daemon=True)
    watcher.start()
    try:
        yield least
    finally:
        over.set()
        watcher.join()


def figure(case: str, arm: str, metric: str, value: float, unit: str, *, verified: bool = True) -> Figure:
    """A line of this benchmark: medians of rounds."""
    return Figure(
        benchmark="checkpoint", arm=arm, case=case, metric=metric, value=value, unit=unit, cycle="median",
        verified=verified,
    )  # fmt: skip


def figures_of(case: str, arm: str, rounds: Sequence[Round], device: str) -> list[Figure]:
    """Medians of all rounds of one arm; one line that says so when it failed."""
    if not rounds:
        return [figure(case, arm, "failed", 1.0, "yes or no", verified=False)]
    verified = all(each.found.verified for each in rounds)
    figures: list[Figure] = []

    def tell(metric: str, of: Callable[[Found], float], unit: str) -> None:
        value = statistics.median(of(each.found) for each in rounds)
        figures.append(figure(case, arm, metric, value, unit, verified=verified))

    copy = "of pinned copy" if device == "cuda" else "of plain copy"
    tell("state", lambda found: found.bytes / GIB, "GiB")
    tell("cycle", lambda found: statistics.median(sum(laps.values()) for laps in found.plain), "s")
    for window in rounds[0].found.windows:
        suffix = "" if window == "full" else f"_{window}"
        tell(f"stall{suffix}", lambda found, of=window: found.stall(of), "s")
        tell(f"stall_ratio{suffix}", lambda found, of=window: found.stall(of) / statistics.median(found.copies), copy)
        for lap in LAPS:
            tell(f"lost_{lap}{suffix}", lambda found, of=window, lap=lap: found.lost(of, lap), "s")
        if is_ours(arm):
            tell(f"reported{suffix}", lambda found, of=window: found.windows[of].reported, "s")
    tell("durable", lambda found: found.windows["full"].durable, "s")
    tell("durable_ratio", lambda found: _write(found) / found.windows["full"].durable, "of raw write")
    if is_ours(arm):
        tell("commit_ratio", lambda found: _write(found) / found.commit, "of raw write")
        tell("load_put", lambda found: found.put, "s")
    tell("load", lambda found: found.load, "s")
    tell("load_ratio", lambda found: _read(found) / found.load, "of raw read")
    tell("files", lambda found: found.files / found.bytes, "of state")
    # What a driver allocates is no part of a process's resident memory; a machine on loan has no other user.
    peaks = [max(each.found.host_peak, each.host if device == "cuda" else 0.0) / each.found.bytes for each in rounds]
    figures.append(figure(case, arm, "host_peak", statistics.median(peaks), "of state", verified=verified))
    return figures


def _write(found: Found) -> float:
    """Seconds of the raw write."""
    return statistics.median(found.writes)


def _read(found: Found) -> float:
    """Seconds of the faster way to read as many bytes as the files of the save have."""
    return min(found.reads)


def limit_figures(case: str, rounds: Sequence[Round]) -> list[Figure]:
    """Rates of the limits of a case over all its processes, and how far the disk moved within one of them."""
    found = [each.found for each in rounds]
    writes = [each.bytes / seconds / 1e9 for each in found for seconds in each.writes]
    reads = [each.files / _read(each) / 1e9 for each in found]
    copies = [each.bytes / seconds / 1e9 for each in found for seconds in each.copies]
    drift = max(max(each.writes) / min(each.writes) - 1 for each in found)
    way = "O_DIRECT" if all(each.direct for each in found) else "buffered: O_DIRECT is refused here"
    return [
        figure(case, "raw-write", "rate", statistics.median(writes), f"GB/s, fsync, {way}"),
        figure(case, "raw-write", "drift", drift, "of itself"),
        figure(case, "raw-read", "rate", statistics.median(reads), "GB/s, not in the page cache"),
        figure(case, "pinned-copy", "rate", statistics.median(copies), "GB/s"),
    ]
