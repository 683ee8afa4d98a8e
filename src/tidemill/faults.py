"""Named points at which tests raise, delay, kill or fill the disk; nothing happens unless a test armed one.

A program passes a point by `point("checkpoint.write.file")`. A test arms it in its own process with `armed`, or in a
child by the environment variable `TIDEMILL_FAULTS="name=action[@nth]"`, several separated by commas. Actions: `raise`,
`kill` (SIGKILL to this process), `disk-full` (OSError ENOSPC), `delay:SECONDS`, `stop` (SIGTERM to this process).
A name may begin with the process in which it counts, `trainer-1/checkpoint.write=kill`; others count in the driver.
"""

import contextlib
import errno
import os
import signal
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field

__all__ = ["FaultInjected", "arm", "armed", "as_process", "passed", "point", "told"]


class FaultInjected(RuntimeError):
    """Raised by the action `raise`."""


@dataclass
class _Fault:
    action: str
    nth: int = 1
    seen: int = field(default=0)


def _parse(text: str) -> dict[str, _Fault]:
    faults = {}
    for word in filter(None, text.split(",")):
        name, _, action = word.strip().partition("=")
        action, _, nth = action.partition("@")
        faults[name] = _Fault(action, int(nth or 1))
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
    if not _armed or name not in _armed:
        return
    with _lock:
        fault = _armed[name]
        fault.seen += 1
        if fault.seen != fault.nth:
            return
    _act(name, fault.action)


def _act(name: str, action: str) -> None:
    kind, _, value = action.partition(":")
    match kind:
        case "raise":
            raise FaultInjected(f"fault injected at {name}")
        case "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        case "stop":
            os.kill(os.getpid(), signal.SIGTERM)
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
def passed() -> Iterator[list[str]]:
    """The names of the points passed within the block, in order: what a kill test iterates over."""
    global _recording
    before, _recording = _recording, []
    try:
        yield _recording
    finally:
        _recording = before
