"""The processes of a run: those of its group, found, killed and waited for."""

import contextlib
import os
import signal
import time
from pathlib import Path


def of_group(group: int) -> list[int]:
    """Those that still run, the leader first. One that nobody has waited for yet runs no more."""
    found = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        with contextlib.suppress(OSError):
            # The name, in brackets, may hold anything.
            state, _, its_group = (entry / "stat").read_text().rpartition(") ")[2].split()[:3]
            if int(its_group) == group and state not in "ZX":
                found.append(int(entry.name))
    return sorted(found, key=lambda process: (process != group, process))


def end_group(group: int) -> None:
    """Kill what is left of it, and wait until it is gone."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(group, signal.SIGKILL)
    wait_for_group(group, seconds=60.0)


def wait_for_group(group: int, *, seconds: float) -> bool:
    """Whether it is gone, of itself, within `seconds`."""
    ends = time.monotonic() + seconds
    while of_group(group):
        if time.monotonic() > ends:
            return False
        time.sleep(0.005)
    return True
