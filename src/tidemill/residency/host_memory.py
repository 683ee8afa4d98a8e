"""How much host memory can still be had, and memory that copies to and from a device run fast on."""

import contextlib
import mmap
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path, PurePosixPath
from typing import Any

import torch

from tidemill.errors import ResidencyError
from tidemill.units import MIB, format_bytes

__all__ = ["MapMemory", "available_bytes", "map_pinned", "map_plain", "refuse_pageable"]

MapMemory = Callable[[int], tuple[mmap.mmap, Callable[[], object]]]

_TOUCH_BYTES = 256 * MIB
_THREADS = 16


def map_plain(size: int) -> tuple[mmap.mmap, Callable[[], object]]:
    """`size` bytes of anonymous memory; the system provides them when they are first written.

    Raises ResidencyError when it does not promise them.
    """
    try:
        return mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS), lambda: None
    except OSError as error:
        raise ResidencyError(f"cannot map {format_bytes(size)} of host memory ({error}); free some") from error


def refuse_pageable(text: str) -> None:
    """Raises ResidencyError."""
    raise ResidencyError(text)


def _cuda_runtime() -> Any:
    return torch.cuda.cudart()  # type: ignore[no-untyped-call]


def map_pinned(
    size: int, *, warn: Callable[[str], None] = refuse_pageable, runtime: Callable[[], Any] = _cuda_runtime
) -> tuple[mmap.mmap, Callable[[], object]]:
    """`size` bytes in huge pages, touched by several threads and then registered with CUDA in one call.

    In this order: registering pages that exist runs ten times as fast as allocating pinned memory. Memory that cannot
    be registered is pageable, which `warn` is told of; by default that is a ResidencyError.
    """
    memory, _ = map_plain(size)
    with contextlib.suppress(OSError):  # a system without huge pages has small ones
        memory.madvise(mmap.MADV_HUGEPAGE)
    whole = torch.frombuffer(memory, dtype=torch.uint8)
    with ThreadPoolExecutor(max_workers=_THREADS) as pool:
        list(pool.map(lambda start: whole[start : start + _TOUCH_BYTES].zero_(), range(0, size, _TOUCH_BYTES)))
    address, cuda = whole.data_ptr(), runtime()
    code = int(cuda.cudaHostRegister(address, size, 0))
    if code == 0:
        # `memory` is named so that it outlives its registration.
        return memory, lambda: (cuda.cudaHostUnregister(address), memory)
    _forget_error()
    warn(
        f"cannot pin {format_bytes(size)} of host memory: cudaHostRegister returned {code}; sleep and wake go on with "
        "pageable memory, at a third to a sixth of the bus (17.8 and 9.1 GB/s were measured where pinned memory gives "
        "55): raise the limit of locked memory (ulimit -l), or free host memory"
    )
    return memory, lambda: None


def _forget_error() -> None:
    """The runtime keeps its last error for whoever asks next: torch, after its next kernel, which would then fail."""
    if torch.cuda.is_available():
        with contextlib.suppress(RuntimeError):
            torch.ones(1, device="cuda")


def available_bytes(root: Path = Path("/")) -> int:
    """Bytes of host memory that this process can still get: the least of what the system and its cgroups allow.

    Linux only. What the system would give up for it, as cached files, counts as available.
    """
    return max(0, min([_system_bytes(root), *_cgroup_bytes(root)]))


def _system_bytes(root: Path) -> int:
    fields = _fields(root / "proc/meminfo")
    return 1024 * fields["MemAvailable:"]


def _cgroup_bytes(root: Path) -> Iterator[int]:
    """What each memory cgroup around this process has left, of version 2 or 1."""
    lines = (line.split(":", 2) for line in _text(root / "proc/self/cgroup").splitlines())
    for number, kinds, path in lines:
        if number == "0" and not kinds:
            yield from _left(
                root / "sys/fs/cgroup", path, "memory.max", "memory.current", ("inactive_file", "active_file")
            )
        elif "memory" in kinds.split(","):
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes")
            cached = ("total_inactive_file", "total_active_file")
            yield from _left(root / "sys/fs/cgroup/memory", path, *names, cached)


def _left(mount: Path, path: str, limit: str, usage: str, cached: tuple[str, ...]) -> Iterator[int]:
    # In a container the mount is the own group already, whatever path the host knows it by.
    inside = PurePosixPath(path.lstrip("/"))
    for group in (mount / inside, *(mount / above for above in inside.parents), mount):
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
