"""The memory of this machine, asked of the system and of the GPU's own tool: no library is loaded."""

import shutil
import subprocess
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from tidemill.units import MIB

__all__ = ["Machine", "available_bytes", "smallest_gpu", "this_machine"]

_PATIENCE = 20.0


@dataclass(frozen=True, kw_only=True)
class Machine:
    """`device` is `cpu` or `cuda`. Bytes of the smallest GPU and of host memory to be had; None where nobody knows."""

    device: str
    device_bytes: int | None
    host_bytes: int | None


def this_machine(*, device: str, device_bytes: int | None = None, host_bytes: int | None = None) -> Machine:
    """The machine for `run.device`, asked for what is not given; `auto` is a GPU where one is seen or told of."""
    if device != "cpu" and device_bytes is None:
        device_bytes = smallest_gpu()
    if device == "auto":
        device = "cpu" if device_bytes is None else "cuda"
    return Machine(
        device=device,
        device_bytes=device_bytes if device == "cuda" else None,
        host_bytes=available_bytes() if host_bytes is None else host_bytes,
    )


def smallest_gpu(tool: str = "nvidia-smi") -> int | None:
    """Bytes of the GPU with the least memory, free or not; None where `tool` is not there or sees none."""
    found = shutil.which(tool)
    if found is None:
        return None
    words = [found, "--query-gpu=memory.total", "--format=csv,noheader,nounits"]
    try:
        told = subprocess.run(words, capture_output=True, text=True, timeout=_PATIENCE, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return None
    return min((int(line) * MIB for line in told.split() if line.isdigit()), default=None)


def available_bytes(root: Path = Path("/")) -> int | None:
    """Bytes of host memory that a process can still get: the least of what the system and its cgroups allow.

    What the system would give up for it, as cached files, counts as available. None where no system says.
    """
    system = _fields(root / "proc/meminfo").get("MemAvailable:")
    return None if system is None else max(0, min([1024 * system, *_cgroup_bytes(root)]))


def _cgroup_bytes(root: Path) -> Iterator[int]:
    """What each memory cgroup around this process has left, of version 2 or 1."""
    for line in _text(root / "proc/self/cgroup").splitlines():
        number, kinds, path = line.split(":", 2)
        if number == "0" and not kinds:
            cached = ("inactive_file", "active_file")
            yield from _left(root / "sys/fs/cgroup", path, "memory.max", "memory.current", cached)
        elif "memory" in kinds.split(","):
            cached = ("total_inactive_file", "total_active_file")
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes")
            yield from _left(root / "sys/fs/cgroup/memory", path, *names, cached)


def _left(mount: Path, path: str, limit: str, usage: str, cached: tuple[str, ...]) -> Iterator[int]:
    # In a container the mount is the own group already, whatever path the host knows it by.
    inside = PurePosixPath(path.lstrip("/"))
    for group in (mount / inside, *(mount / above for above in inside.parents)):
        allowed, used = _text(group / limit).strip(), _text(group / usage).strip()
        if allowed.isdigit() and used.isdigit():
            files = _fields(group / "memory.stat")
            yield int(allowed) - int(used) + sum(files.get(name, 0) for name in cached)


def _fields(path: Path) -> Mapping[str, int]:
    words = (line.split() for line in _text(path).splitlines())
    return {line[0]: int(line[1]) for line in words if len(line) > 1 and line[1].isdigit()}


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
