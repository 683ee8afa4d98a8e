"""Two tenants of equal size on one device, one going while the other comes; and when a wake's first bytes are there.

`swap_ratio`: seconds of the swap over those of plain copies out and back, one after the other, both directions of a bus
at once being what could be won. `serial_ratio`: the same of our own sleep and then wake. `first_slab` is the share of a
whole wake after which the first tensor can be used.
"""

import statistics
import sys
import time
from collections.abc import Generator
from multiprocessing.connection import Connection
from typing import Any

import torch

from benchmarks.bus import plain_copies, timed
from benchmarks.figures import Figure
from benchmarks.offload.arms import Tidemill
from benchmarks.offload.cases import Case
from benchmarks.offload.cycles import TURN
from benchmarks.processes import Child, Failed, one_gpu
from tidemill.contracts.footprint import Part
from tidemill.contracts.residency import Gate, Moved
from tidemill.residency.gate import TenantGate
from tidemill.residency.swap import swap
from tidemill.units import MIB

__all__ = ["run_swaps"]

# Device bytes that a swap may take beside those of who leaves: some slabs on their way.
_ROOM = 512 * MIB


class Pieced:
    """A tenant that is its saver."""

    def __init__(self, name: str, case: Case) -> None:
        self.name = name
        self.gate: Gate = TenantGate(name)
        self.arm = Tidemill((case, "", ""))
        self.version = 0

    def resident(self) -> Part:
        """What is awake."""
        return self.arm.saver.resident_part()

    def footprint(self, part: Part) -> int:
        """Bytes when it is awake."""
        return self.arm.saver.device_bytes(part)

    def host_bytes(self) -> int:
        """Of its arena."""
        return self.arm.saver.host_bytes()

    def wake_up(self, part: Part) -> Moved:
        """All at once."""
        self.arm.saver.restore(part)
        return Moved()

    def sleep(self) -> Moved:
        """All at once, as if a step had been made."""
        self.version += 1
        self.arm.sleep(self.version)
        return Moved()

    def leave(self) -> Generator[int, None, Any]:
        """Piece by piece, as if a step had been made."""
        self.version += 1
        return self.arm.saver.leave(self.version)

    def arrive(self, part: Part) -> Generator[int, None, Any]:
        """Piece by piece."""
        return self.arm.saver.arrive(part)


Seconds = dict[str, list[float]]


def run_swaps(context: Any, case: Case, cycles: int) -> list[Figure]:
    """Figures of one fresh process on the first GPU."""
    with one_gpu(0):
        child = Child(context, _swap_and_back, case, cycles)
    try:
        seconds, verified = child.answer()
    except Failed as failure:
        print(f"swap: {failure}", file=sys.stderr)
        return [_figure("failed", 1.0, "yes or no", "first", verified=False)]
    finally:
        child.end()
    figures = []
    for cycle, pick in (("first", slice(0, 1)), ("median", slice(2, None))):
        serial = statistics.median(seconds["out"]) + statistics.median(seconds["back"])
        median = {name: statistics.median(values[pick] or values) for name, values in seconds.items()}
        for name in ("swap", "serial"):
            figures.append(_figure(name, median[name], "s", cycle, verified=verified))
            figures.append(
                _figure(f"{name}_ratio", median[name] / serial, "of serial copies", cycle, verified=verified)
            )
        share = median["first"] / median["whole"]
        figures.append(_figure("first_slab", share, "of the wake", cycle, verified=verified))
    return figures


def _swap_and_back(pipe: Connection, case: Case, cycles: int) -> None:
    device = torch.device(case.device)
    if case.device == "cpu":
        torch.set_num_threads(1)
    one, other = Pieced("one", case), Pieced("other", case)
    right = [tenant.arm.fingerprint() for tenant in (one, other)]
    if case.device == "cuda":
        torch.cuda.empty_cache()
    other.sleep()
    seconds: Seconds = {}
    copies = [plain_copies(one.arm.bytes, device)]
    for _ in range(cycles):
        _note(seconds, "swap", timed(device, lambda: swap(one, other, Part.ALL, room=_ROOM)))
        _note(seconds, "serial", timed(device, lambda: (other.sleep(), one.wake_up(Part.ALL))))
    one.sleep()
    for _ in range(cycles):
        time.sleep(TURN if device.type == "cuda" else 0.0)
        first, whole = _wake(one, device)
        _note(seconds, "first", first)
        _note(seconds, "whole", whole)
        one.sleep()
    copies.append(plain_copies(one.arm.bytes, device))
    seconds["out"] = [second for both in copies for second in both[0]]
    seconds["back"] = [second for both in copies for second in both[1]]
    one.wake_up(Part.ALL)
    other.wake_up(Part.ALL)
    verified = [tenant.arm.fingerprint() for tenant in (one, other)] == right
    one.arm.close()
    other.arm.close()
    pipe.send((seconds, verified))


def _wake(tenant: Pieced, device: torch.device) -> tuple[float, float]:
    """Seconds until the first tensor is usable, and until all are, of one wake."""
    saver = tenant.arm.saver
    firsts: list[float] = []

    def wake() -> None:
        began = time.perf_counter()
        saver.restore(Part.ALL, wait=False)
        saver.arrived(["tensor/0"])
        firsts.append(time.perf_counter() - began)
        saver.arrived(saver.ledger.names())

    whole = timed(device, wake)
    return firsts[0], whole


def _note(seconds: Seconds, name: str, value: float) -> None:
    seconds.setdefault(name, []).append(value)


def _figure(metric: str, value: float, unit: str, cycle: str, *, verified: bool) -> Figure:
    return Figure(
        benchmark="offload", arm="tidemill", case="swap", metric=metric, value=value, unit=unit, cycle=cycle,
        verified=verified,
    )  # fmt: skip
