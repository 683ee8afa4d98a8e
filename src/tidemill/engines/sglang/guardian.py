"""The process between a run and a server: when either is gone, nothing of the other's is left.

Started as `python -m tidemill.engines.sglang.guardian LOG COMMAND...`. It starts the command, whose output goes to the
log, and adopts what that leaves behind. When its standard input ends, because the run closed it or because the run is
dead in whatever manner, it kills them all; when the server ends by itself, it kills the rest and ends with its code. It
has a session of its own: Ctrl-C in the run's terminal reaches neither it nor anything below it.
"""

import contextlib
import ctypes
import os
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil

__all__ = ["main"]

_PR_SET_CHILD_SUBREAPER = 36  # linux/prctl.h
_LOOK = 0.25
_PATIENCE = 10.0  # seconds that killed processes are waited for


def main(log: Path, command: list[str]) -> int:
    """Guard until the run or the server is gone; what the server ended with, or 0."""
    for number in (signal.SIGINT, signal.SIGHUP, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1)
    run = os.getppid()
    try:
        with log.open("ab") as output:
            server = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, preexec_fn=_as_usual
            )
        # A fork of the run may hold the other end of our input after its death: hence the look at the parent too.
        while os.getppid() == run and server.poll() is None:
            if select.select([0], [], [], _LOOK)[0]:
                return 0
        code = server.poll()
        return 0 if code is None else code if code > 0 else 128 - code
    finally:
        _end_all()


def _as_usual() -> None:
    """What a server expects of its signals."""
    for number in (signal.SIGINT, signal.SIGHUP, signal.SIGTERM):
        signal.signal(number, signal.SIG_DFL)


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
    sys.exit(main(Path(sys.argv[1]), sys.argv[2:]))
