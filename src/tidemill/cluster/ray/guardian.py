"""The process that outlives the driver for a moment, to leave nothing behind.

Started as `python -m tidemill.cluster.ray.guardian FOLDER SETTINGS`. It starts a private cluster's head, and adopts
every process that the cluster loses on its way. When its standard input ends, because the driver closed it or because
the driver is dead in whatever manner, it kills them all and removes the folder. It has a session of its own: Ctrl-C in
the driver's terminal reaches neither it nor anything below it.
"""

import contextlib
import ctypes
import os
import select
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil

__all__ = ["main"]

_PR_SET_CHILD_SUBREAPER = 36  # linux/prctl.h
_PATIENCE = 10.0  # seconds that killed processes are waited for


def main(folder: Path, settings: str) -> None:
    """Guard until the driver or the head is gone."""
    for number in (signal.SIGINT, signal.SIGHUP, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1)
    driver = os.getppid()
    try:
        _guard(driver, folder, settings)
        _end_all()
        # The driver may want to read there why the head ended.
        while os.getppid() == driver and not _input_ended():
            pass
    finally:
        _end_all()
        shutil.rmtree(folder, ignore_errors=True)


def _guard(driver: int, folder: Path, settings: str) -> None:
    with (folder / "head.log").open("wb") as log:
        head = subprocess.Popen(
            [sys.executable, "-m", "tidemill.cluster.ray.head", settings], stdin=subprocess.PIPE, stderr=log
        )
    # The head's answer goes straight to the driver, and its end is seen there when nobody else holds the pipe.
    os.close(1)
    # A fork of the driver may hold the other end of our input after its death: hence the look at the parent too.
    while os.getppid() == driver and _adopted_are_reaped(head.pid) and not _input_ended():
        pass


def _input_ended() -> bool:
    """Waits for half a second at most."""
    return bool(select.select([0], [], [], 0.5)[0])


def _adopted_are_reaped(head: int) -> bool:
    """Take leave of children that ended; False when the head is one of them."""
    with contextlib.suppress(ChildProcessError):
        while True:
            pid, _ = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                return True
            if pid == head:
                return False
    return False


def _end_all() -> None:
    """Kill every process below this one, and those that come to it because their parents were killed."""
    ends = time.monotonic() + _PATIENCE
    while time.monotonic() < ends:
        below = psutil.Process().children(recursive=True)
        if not below:
            return
        for process in below:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        time.sleep(0.02)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
