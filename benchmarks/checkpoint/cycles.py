"""One arm's process: cycles of train, save, sleep, rollout and wake, with and without a save, and then a load.

A rollout is a stub that sleeps. Seconds of a cycle are wall time but for the rollout's nominal length, so that what a
rollout is disturbed by counts as well.
"""

import gc
import statistics
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path

import torch

from benchmarks.bus import plain_copies, synchronise, timed
from benchmarks.checkpoint.arms import ARMS, Arm, Tidemill
from benchmarks.checkpoint.disk import Raw, drop_from_cache, folder_bytes
from benchmarks.checkpoint.house import House
from benchmarks.offload.cases import Case, fingerprint
from benchmarks.outside import forget_host_peak, host_peak
from tidemill.units import GIB

__all__ = ["BEGUN", "SAVED", "LAPS", "Found", "Laps", "Loop", "Window", "go_through", "has_half", "sleeps"]

BEGUN, SAVED = "begun", "saved"
"""What a process says when it waits to be looked at: before it holds anything, and when all saves are over."""
Laps = dict[str, float]
"""Seconds of one cycle by what they were spent on: `wake`, `train`, `call` (which saves), `sleep`, `rollout`."""
LAPS = ("wake", "train", "call", "sleep", "rollout")
_BEFORE, _AFTER = 3, 2
"""Cycles without a save before all saves, and after them."""
_MOST = 10
_SHORT = 0.02
"""Seconds of a rollout behind which nothing is written."""
_READ_AGAIN = 4 * GIB
"""Bytes that are read a second time, the slower way on most disks."""


def sleeps(arm: str) -> bool:
    """Whether the trainer sleeps during rollouts."""
    return arm != "tidemill-awake"


def is_behind(arm: str) -> bool:
    """Whether it writes behind the loop, so that the length of a rollout matters."""
    return arm.startswith(("tidemill", "dcp-async"))


def has_half(arm: str) -> bool:
    """Whether it is measured with rollouts that are too short for the disk: who writes behind a trainer that sleeps."""
    return is_behind(arm) and sleeps(arm)


class _Clock:
    """Seconds by what they were spent on."""

    def __init__(self) -> None:
        self.laps: Laps = {}
        self.restart()

    def restart(self) -> None:
        """What came since the last lap is nobody's."""
        self._began = time.perf_counter()

    def lap(self, name: str, *, less: float = 0.0) -> None:
        """What came since the last lap, but for `less`, is this one's."""
        now = time.perf_counter()
        self.laps[name] = now - self._began - less
        self._began = now


@dataclass(frozen=True, kw_only=True)
class Window:
    """One save and the cycles until it is durable, at least the next one.

    `durable` are the seconds from the begin of the call that saves until the save was durable, `reported` those
    in which the loop waited because of the save by its own account.
    """

    cycles: list[Laps]
    durable: float
    reported: float

    def lost(self, lap: str, plain: Sequence[Laps]) -> float:
        """Seconds by which this lap took longer in all cycles than in as many without a save."""
        usual = statistics.median(laps.get(lap, 0.0) for laps in plain)
        return sum(laps.get(lap, 0.0) - usual for laps in self.cycles)

    def stall(self, plain: Sequence[Laps]) -> float:
        """Seconds that the loop lost."""
        usual = statistics.median(sum(laps.values()) for laps in plain)
        return sum(sum(laps.values()) - usual for laps in self.cycles)


@dataclass(frozen=True, kw_only=True)
class Found:
    """Of one process, in seconds and bytes. `plain` are cycles without a save.

    `commit` is of the writing alone and `put` that part of the load that follows verification, where the arm tells.
    `host_peak` is by how much the process grew at most, less what stands for the device on a CPU.
    """

    bytes: int
    files: int
    prepare: float
    plain: list[Laps]
    windows: dict[str, Window]
    commit: float
    load: float
    put: float
    host_peak: float
    copies: list[float]
    writes: list[float]
    reads: list[float]
    direct: bool
    verified: bool

    def stall(self, window: str) -> float:
        """Seconds that the save of this window added to the loop."""
        return self.windows[window].stall(self.plain)

    def lost(self, window: str, lap: str) -> float:
        """Of that, in this lap."""
        return self.windows[window].lost(lap, self.plain)


@dataclass
class Loop:
    """Cycles of one house. `wanted` are checksums of what was saved last; `peak` is the most host memory seen.

    Taking checksums needs memory that is nobody's: it is kept out of `peak`.
    """

    house: House
    arm: Arm
    device: torch.device
    asleep: bool
    wanted: list[int] = field(default_factory=list)
    peak: float = 0.0
    _began: float = 0.0

    def cycle(self, rollout: float, *, save: bool = False) -> Laps:
        """One cycle, which ends when the rollout does; of that the laps have what exceeds its nominal length.

        That is `rollout` seconds, and short when the last save is durable before it begins.
        """
        house, clock = self.house, _Clock()
        with house.residency.awake(house.trainer):
            synchronise(self.device)
            clock.lap("wake")
            house.trainer.change()
            synchronise(self.device)
            clock.lap("train")
            if save:
                self._note_contents()
                clock.restart()
                self._began = time.perf_counter()
                self.arm.save()
                clock.lap("call")
        with ExitStack() as lease:
            if self.asleep:
                lease.enter_context(house.residency.awake(house.engine))
            clock.lap("sleep")
            length = rollout if self.arm.durable() is None else min(rollout, _SHORT)
            time.sleep(length)
            clock.lap("rollout", less=length)
        return clock.laps

    def _note_contents(self) -> None:
        self.note_peak()
        self.wanted = self.house.trainer.fingerprint()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
        forget_host_peak()

    def note_peak(self) -> float:
        """The most host memory of this process until now."""
        self.peak = max(self.peak, host_peak())
        return self.peak

    def plain(self, count: int) -> list[Laps]:
        """Cycles without a save."""
        return [self.cycle(_SHORT) for _ in range(count)]

    def window(self, rollout: float) -> Window:
        """Cycles with one save; when it returns nothing is written any more."""
        reported = self.house.reported()
        cycles = [self.cycle(rollout, save=True)]
        while len(cycles) < 2 or (self.arm.durable() is None and len(cycles) < _MOST):
            cycles.append(self.cycle(rollout))
        self.arm.finish()
        durable = self.arm.durable()
        if durable is None:
            raise RuntimeError("all saves are over, and the last one did not become durable")
        return Window(cycles=cycles, durable=durable - self._began, reported=self.house.reported() - reported)


def go_through(pipe: Connection, arm_name: str, case: Case, folder: Path) -> None:
    """The life of the process. It lets itself be looked at twice: see BEGUN and SAVED."""
    device = torch.device(case.device)
    if device.type == "cpu":
        torch.set_num_threads(1)
    fingerprint([torch.ones(1 << 20, device=device)])  # with the kernels for it loaded
    copies = plain_copies(case.size, device)[0]
    raw = Raw(folder)
    rollout = raw.write(case.size)
    forget_host_peak()
    start = host_peak()
    _look_at_me(pipe, BEGUN)
    began = time.perf_counter()
    house = House(case)
    prepare = time.perf_counter() - began
    size = house.trainer.memory.bytes
    # As a run does before its loop: else Python's collector looks through all of torch whenever many objects are made.
    gc.collect()
    gc.freeze()
    arm = ARMS[arm_name](house, folder)
    forget_host_peak()
    loop = Loop(house, arm, device, asleep=sleeps(arm_name))
    plain = loop.plain(_BEFORE + 1)[1:]  # the first one of a process is slower than others
    windows = {"half": loop.window(rollout / 2)} if has_half(arm_name) else {}
    windows["full"] = loop.window(rollout if is_behind(arm_name) else _SHORT)
    grown = loop.note_peak() - start - (size if device.type == "cpu" else 0)
    _look_at_me(pipe, SAVED)
    plain += loop.plain(_AFTER)
    writes = [rollout, raw.write(case.size)]
    load, reads, right = _load(loop, raw)
    pipe.send(
        Found(
            bytes=size,
            files=folder_bytes(arm.folder),
            prepare=prepare,
            plain=plain,
            windows=windows,
            commit=arm.commit_seconds if isinstance(arm, Tidemill) else 0.0,
            load=load,
            put=house.trainer.load_seconds,
            host_peak=grown,
            copies=copies,
            writes=writes,
            reads=reads,
            direct=raw.direct,
            verified=right,
        )
    )
    arm.close()
    house.close()


def _load(loop: Loop, raw: Raw) -> tuple[float, list[float], bool]:
    """Seconds of a load into changed tensors; of a plain read before, and of one after; whether contents are right."""
    house, folder = loop.house, loop.arm.folder
    with house.residency.awake(house.trainer):
        house.trainer.change()
        before = raw.read(folder, direct=True)
        drop_from_cache(folder)
        load = timed(loop.device, loop.arm.load)
        after = raw.read(folder, direct=False, most=_READ_AGAIN)
        return load, [before, after], house.trainer.fingerprint() == loop.wanted


def _look_at_me(pipe: Connection, what: str) -> None:
    pipe.send(what)
    pipe.recv()
