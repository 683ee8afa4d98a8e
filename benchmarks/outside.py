"""Memory of processes as another process sees it."""

import contextlib
import ctypes
import subprocess
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import psutil
import torch

from benchmarks.processes import Child, one_gpu
from tidemill.units import KIB, MIB

__all__ = [
    "NoOnlooker",
    "Onlooker",
    "files_and_threads",
    "forget_host_peak",
    "give_back_freed",
    "host_free",
    "host_peak",
]


class Onlooker:
    """A process with a context of its own on a GPU and nothing else there: it reads what the driver says."""

    def __init__(self, context: Any, gpu: int) -> None:
        with one_gpu(gpu):
            self._child = Child(context, _look)
        self._child.answer()

    def used(self) -> float:
        """Bytes in use on the whole device: what others hold, the onlooker's own context included."""
        used, _ = self._child.ask(0)
        return float(used)

    def used_by(self, pid: int) -> float:
        """Bytes that the driver says `pid` holds, its context included; nan where it does not tell."""
        _, processes = self._child.ask(pid)
        return float(processes.get(pid, float("nan")))

    def close(self) -> None:
        """End the process."""
        self._child.end()


class NoOnlooker:
    """Where there is no GPU."""

    def used(self) -> float:
        """Unknown."""
        return float("nan")

    def used_by(self, pid: int) -> float:
        """Unknown."""
        return float("nan")

    def close(self) -> None:
        """Nothing to end."""


def _look(pipe: Connection) -> None:
    torch.ones(1, device="cuda")
    pipe.send("ready")
    while True:
        pid = pipe.recv()
        free, whole = torch.cuda.mem_get_info()
        pipe.send((whole - free, _by_process() if pid else {}))


def _by_process() -> dict[int, int]:
    """Bytes by process id. Empty in a container whose process ids the driver does not know."""
    command = ["nvidia-smi", "--query-compute-apps=pid,used_memory", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True)
    except (OSError, subprocess.SubprocessError):
        return {}
    rows = (line.split(",") for line in done.stdout.splitlines() if line.strip())
    return {int(pid): int(mib) * MIB for pid, mib in rows if mib.strip().isdigit()}


def host_free() -> float:
    """Bytes that programs of this machine may still take."""
    return float(psutil.virtual_memory().available)


def forget_host_peak() -> None:
    """Count `host_peak` from now on."""
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")


def host_peak() -> float:
    """Most bytes that this process held in host memory since then, but for what a driver allocated for it."""
    fields = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return float(fields["VmHWM"].split()[0]) * KIB


def give_back_freed() -> None:
    """Give back to the system what this process freed and the C library keeps for later; glibc can."""
    library = ctypes.CDLL(None)
    if hasattr(library, "malloc_trim"):
        library.malloc_trim(0)


def files_and_threads() -> tuple[int, int]:
    """Open file handles and threads of this process."""
    return len(list(Path("/proc/self/fd").iterdir())), len(list(Path("/proc/self/task").iterdir()))
