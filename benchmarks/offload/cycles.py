"""One arm's process: sleep and wake some times between two measurements of the limit, and check the contents."""

import functools
import time
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

import torch

from benchmarks.bus import Copies, plain_copies, timed
from benchmarks.offload.arms import Arm, Settings, build
from benchmarks.offload.cases import fingerprint
from benchmarks.outside import forget_host_peak, host_peak

__all__ = ["ASLEEP", "BEGUN", "TURN", "Found", "go_through"]

BEGUN, ASLEEP = "begun", "asleep"
"""What a process says when it waits to be looked at: with its context and nothing else, and while it sleeps."""
_PATIENCE = 120.0
TURN = 0.2
"""Seconds asleep on a GPU: less than an engine's turn takes."""


@dataclass(frozen=True, kw_only=True)
class Found:
    """Of one process. Seconds by cycle; `limits` are plain copies of all live bytes before the cycles and after.

    `kept` are bytes on the device that the arm knows of while asleep; `host_peak` is by how much the process grew at
    most on the host, of the arm's doing.
    """

    bytes: int
    prepare: float
    sleep: list[float]
    wake: list[float]
    limits: tuple[Copies, Copies]
    kept: float
    host_peak: float
    verified: bool


def go_through(pipe: Connection, arm_name: str, settings: Settings, cycles: int, barrier: Any) -> None:
    """The life of the process; several ranks do each timed thing at the same moment.

    Contents are compared after the first wake, then changed, and compared again after the last one: nobody passes who
    copies only once.
    """
    try:
        pipe.send(_found(pipe, arm_name, settings, cycles, barrier))
    except BaseException:
        # Else the other ranks would wait, on a device that somebody pays for.
        barrier.abort()
        raise


def _found(pipe: Connection, arm_name: str, settings: Settings, cycles: int, barrier: Any) -> Found:
    device = torch.device(settings[0].device)
    if device.type == "cpu":
        torch.set_num_threads(1)
    fingerprint([torch.ones(1 << 20, device=device)])  # with the kernels for it loaded
    if device.type == "cuda":
        torch.cuda.Stream(device)  # PyTorch makes all that it will ever have with the first
        torch.cuda.empty_cache()
    _look_at_me(pipe, BEGUN)
    start = host_peak()
    arm, prepare = build(arm_name, settings)
    made = host_peak()
    before = _limit(arm.bytes, device, barrier)
    forget_host_peak()
    sleep, wake, kept, right = _cycles(arm, cycles, device, pipe, barrier)
    grown = max(made, host_peak()) - start
    after = _limit(arm.bytes, device, barrier)
    arm.close()
    return Found(
        bytes=arm.bytes,
        prepare=prepare,
        sleep=sleep,
        wake=wake,
        limits=(before, after),
        kept=kept,
        host_peak=grown,
        verified=right,
    )


def _fingerprint(arm: Arm, device: torch.device) -> list[int]:
    """Of all contents; what it took of the device is nobody's residue."""
    found = arm.fingerprint()
    if device.type == "cuda":
        torch.cuda.empty_cache()
    return found


def _look_at_me(pipe: Connection, what: str) -> None:
    pipe.send(what)
    pipe.recv()


def _limit(size: int, device: torch.device, barrier: Any) -> Copies:
    barrier.wait(_PATIENCE)
    return plain_copies(size, device)


def _cycles(
    arm: Arm, cycles: int, device: torch.device, pipe: Connection, barrier: Any
) -> tuple[list[float], list[float], float, bool]:
    sleep: list[float] = []
    wake: list[float] = []
    kept, right, before = 0.0, True, _fingerprint(arm, device)
    for cycle in range(cycles):
        barrier.wait(_PATIENCE)
        sleep.append(timed(device, functools.partial(arm.sleep, cycle)))
        kept = max(kept, arm.kept())
        if cycle in (0, cycles - 1):
            _look_at_me(pipe, ASLEEP)
        time.sleep(TURN if device.type == "cuda" else 0.0)
        barrier.wait(_PATIENCE)
        wake.append(timed(device, arm.wake))
        if cycle in (0, cycles - 1):
            right = _fingerprint(arm, device) == before and right
        if cycle == 0:
            arm.change()
            before = _fingerprint(arm, device)
    return sleep, wake, kept, right
