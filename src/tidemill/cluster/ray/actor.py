"""A worker as a Ray actor. Only what prepares the process is here; the calls are those of cluster.worker.

Nothing heavy is imported before `prepare`, which decides about threads and devices.
"""

import contextlib
import faulthandler
import os
import platform
import random
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ray

from tidemill.cluster.ray.versions import versions

if TYPE_CHECKING:
    from tidemill.cluster.worker import Reply, Worker

__all__ = ["HostFacts", "RayWorker", "Start"]


@dataclass(frozen=True, kw_only=True)
class HostFacts:
    """What a worker tells of itself before anything is built."""

    host: str
    ip: str
    pid: int
    versions: dict[str, str]


@dataclass(frozen=True, kw_only=True)
class Start:
    """What a worker is told. `beside` workers of its role share its host; `threads` 0 divides the cores among them.

    `token` is a file that the driver wrote and its text; `alone` says that no other host takes part. `search_path` is
    where the driver finds modules: a plug-in is found in the same places here.
    """

    name: str
    device: str
    seed: int
    threads: int
    beside: int
    fault_text: str
    search_path: tuple[str, ...]
    log: Path
    token: tuple[Path, str]
    alone: bool
    ip: str


class RayWorker:
    """Calls run one after the other in one thread; `control` beside them. Every outcome of theirs is a `Reply`."""

    def __init__(self) -> None:
        # Ray runs calls in threads of its own choice, and settings of PyTorch and OpenMP belong to a thread.
        self._thread = ThreadPoolExecutor(1, "worker")
        self._worker: Worker

    def facts(self) -> HostFacts:
        """Answered first."""
        return HostFacts(host=platform.node(), ip=ray.util.get_node_ip_address(), pid=os.getpid(), versions=versions())

    def prepare(self, start: Start) -> str:
        """Make the process what it shall be; in words why it cannot be used, or nothing."""
        path, text = start.token
        try:
            if path.read_text() != text:
                return f"{path} does not hold what the driver wrote there"
            _print_to(start.log)
        except OSError as error:
            return str(error)
        return self._thread.submit(_prepared, start, self._hold).result()

    def _hold(self, worker: "Worker") -> None:
        self._worker = worker

    def open_rendezvous(self, host: str) -> "Reply":
        """See Worker."""
        return self._run(self._worker.open_rendezvous, host)

    def build(self, *arguments: Any) -> "Reply":
        """See Worker."""
        return self._run(self._worker.build, *arguments)

    def call(self, method: str, *arguments: Any) -> "Reply":
        """See Worker."""
        return self._run(self._worker.call, method, *arguments)

    def give(self, method: str, *arguments: Any) -> "Reply":
        """See Worker."""
        return self._run(self._worker.give, method, *arguments)

    @ray.method(concurrency_group="control")  # type: ignore[untyped-decorator]  # Ray says nothing of types
    def control(self, method: str, *arguments: Any) -> "Reply":
        """See Worker."""
        return self._worker.control(method, *arguments)

    def free_bytes(self, device: str) -> int:
        """Of the device, or of this host's memory."""
        return self._thread.submit(_free_bytes, device).result()

    def _run(self, method: Callable[..., "Reply"], *arguments: Any) -> "Reply":
        try:
            return self._thread.submit(method, *arguments).result()
        finally:
            _flush()


def _flush() -> None:
    with contextlib.suppress(OSError, ValueError):
        sys.stdout.flush()
        sys.stderr.flush()


def _print_to(log: Path) -> None:
    """Send whatever this process prints to `log`, from C too, and the stacks when it crashes."""
    log.parent.mkdir(parents=True, exist_ok=True)
    target = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    _flush()
    for fd in (1, 2):
        os.dup2(target, fd)
    os.close(target)
    sys.stdout = open(1, "w", buffering=1, closefd=False, errors="replace")  # noqa: SIM115
    sys.stderr = open(2, "w", buffering=1, closefd=False, errors="replace")  # noqa: SIM115
    faulthandler.enable(file=2, all_threads=False)


def _prepared(start: Start, hold: Callable[["Worker"], None]) -> str:
    """In the thread of the calls."""
    # Behind what this host has itself, which must stay what was compared with the driver's.
    sys.path.extend(folder for folder in start.search_path if folder not in sys.path)
    threads = start.threads or max(1, _cores() // start.beside)
    os.environ.update(_environment(start, threads))
    import numpy as np
    import torch

    from tidemill.cluster.worker import Worker

    torch.set_num_threads(threads)
    random.seed(start.seed)
    np.random.seed(start.seed % 2**32)
    torch.manual_seed(start.seed)
    hold(Worker(name=start.name, fault_text=start.fault_text, host=f"{platform.node()} ({start.ip})"))
    if start.device == "cuda" and not torch.cuda.is_available():
        return f"PyTorch {torch.__version__} sees no GPU there"
    return ""


def _cores() -> int:
    if sys.platform == "linux":
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _environment(start: Start, threads: int) -> dict[str, str]:
    """What libraries read when they are loaded."""
    wanted = {"OMP_NUM_THREADS": str(threads), "TOKENIZERS_PARALLELISM": "false"}
    if "GOMP_SPINCOUNT" not in os.environ:
        wanted["GOMP_SPINCOUNT"] = "0"  # idle threads that spin take the cores from whoever works
    if start.device == "cpu":
        wanted["CUDA_VISIBLE_DEVICES"] = ""
    # Nobody else shall reach what ranks of one host open for each other.
    interface = "lo" if start.alone and sys.platform == "linux" else _interface_of(start.ip)
    if interface and "GLOO_SOCKET_IFNAME" not in os.environ:
        wanted["GLOO_SOCKET_IFNAME"] = interface
    if interface and "NCCL_SOCKET_IFNAME" not in os.environ:
        wanted["NCCL_SOCKET_IFNAME"] = f"={interface}"
    return wanted


def _interface_of(ip: str) -> str:
    """The network interface that has this address: the one by which other hosts reach this one."""
    import psutil

    for name, addresses in psutil.net_if_addrs().items():
        if any(address.address == ip for address in addresses):
            return name
    return ""


def _free_bytes(device: str) -> int:
    import psutil
    import torch

    if device == "cuda":
        return int(torch.cuda.mem_get_info()[0])
    return int(psutil.virtual_memory().available)
