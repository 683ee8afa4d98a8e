"""Named points at which tests raise, delay, kill or fill the disk; nothing happens unless a test armed one.

A program passes a point by `point("checkpoint.write.file")`. A test arms it in its own process with `armed`, or in a
child by the environment variable `TIDEMILL_FAULTS="name=action[@nth]"`, several separated by commas. Actions: `raise`,
`kill` (SIGKILL to this process), `disk-full` (OSError ENOSPC), `delay:SECONDS`, `stop` (SIGTERM to this process, or
what it names, `stop:SIGINT`).
`skip` leaves out the step of that name, each time unless `@nth` says which, where the program asks `skipped("name")`:
so that a test of invariants can see that it would notice. `calling` arms what has no word here.
A name may begin with the process in which it counts, `trainer-1/checkpoint.write=kill`; others count in the driver.
"""

import contextlib
import errno
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

__all__ = ["FaultInjected", "arm", "armed", "as_process", "calling", "passed", "point", "skipped", "told"]

_SKIP = "skip"


class FaultInjected(RuntimeError):
    """Raised by the action `raise`."""


@dataclass
class _Fault:
    """`nth` 0 is not said: the first time, or each time for what is skipped or called."""

    action: str
    nth: int = 0
    call: Callable[[], object] | None = None
    seen: int = field(default=0)


def _parse(text: str) -> dict[str, _Fault]:
    faults = {}
    for word in filter(None, text.split(",")):
        name, _, action = word.strip().partition("=")
        action, _, nth = action.partition("@")
        faults[name] = _Fault(action, int(nth or 0))
    return faults


def _here(text: str) -> dict[str, _Fault]:
    """What of `text` counts in this process."""
    found = {}
    for name, fault in _parse(text).items():
        process, slash, bare = name.rpartition("/")
        if (process if slash else "driver") == _process:
            found[bare] = fault
    return found


_process = "driver"
_texts: list[str] = [os.environ.get("TIDEMILL_FAULTS", "")]
_armed: dict[str, _Fault] = _here(_texts[0])
_recording: list[str] | None = None
_lock = threading.Lock()


def point(name: str) -> None:
    """Pass the named point. Costs one look-up in an empty dict when nothing is armed."""
    if _recording is not None:
        _recording.append(name)
    if not _armed or (fault := _armed.get(name)) is None:
        return
    if fault.call is not None:
        fault.call()
    elif fault.action != _SKIP and _count(fault) == (fault.nth or 1):
        _act(name, fault.action)


def skipped(name: str) -> bool:
    """Whether a test wants the step `name` left out. Costs one look-up in an empty dict when nothing is armed."""
    if not _armed or (fault := _armed.get(name)) is None:
        return False
    return fault.action == _SKIP and fault.nth in (0, _count(fault))


def _count(fault: _Fault) -> int:
    """How often it was come by, this time included."""
    with _lock:
        fault.seen += 1
        return fault.seen


def _act(name: str, action: str) -> None:
    kind, _, value = action.partition(":")
    match kind:
        case "raise":
            raise FaultInjected(f"fault injected at {name}")
        case "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        case "stop":
            os.kill(os.getpid(), signal.Signals[value or "SIGTERM"])
        case "disk-full":
            raise OSError(errno.ENOSPC, "No space left on device (injected)")
        case "delay":
            time.sleep(float(value))
        case _:
            raise ValueError(f"no such fault action: {action!r}")


def arm(text: str) -> None:
    """Arm faults in this process for good; `text` as in TIDEMILL_FAULTS, which is read once, at import."""
    _texts.append(text)
    _armed.update(_here(text))


def told() -> str:
    """All that was armed in this process, for others too: what a child process is given."""
    return ",".join(filter(None, _texts))


def as_process(name: str, text: str) -> None:
    """Be the process `name` from now on, with what counts there of `text` armed, and nothing else."""
    global _process
    _process = name
    _texts[:] = [text]
    _armed.clear()
    _armed.update(_here(text))


@contextlib.contextmanager
def armed(text: str) -> Iterator[None]:
    """Arm faults in this process for a block; `text` as in TIDEMILL_FAULTS."""
    before, texts = dict(_armed), list(_texts)
    arm(text)
    try:
        yield
    finally:
        _armed.clear()
        _armed.update(before)
        _texts[:] = texts


@contextlib.contextmanager
def calling(name: str, call: Callable[[], object]) -> Iterator[None]:
    """Call `call` at each pass of the point `name` within the block, in this process, by the thread that passes."""
    with armed(""):
        _armed[name] = _Fault("call", call=call)
        yield


@contextlib.contextmanager
def passed() -> Iterator[list[str]]:
    """The names of the points passed within the block, in order: what a kill test iterates over."""
    global _recording
    before, _recording = _recording, []
    try:
        yield _recording
    finally:
        _recording = before
