"""The limit that transitions are compared with: plain copies of so many bytes between a device and pinned host memory.

On a CPU, which has no bus, copies within memory that is ready. Host memory is made here and not by the arena of the
project, so that the limit does not move with what is measured against it.
"""

import mmap
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import torch

from tidemill.units import MIB

__all__ = ["Copies", "plain_copies", "synchronise", "timed"]

_COPIES = 3
_TOUCHED_AT_ONCE = 256 * MIB

Copies = tuple[list[float], list[float]]
"""Seconds of each copy out of the device, and of each one back."""


def timed(device: torch.device, work: Callable[[], object]) -> float:
    """Wall seconds between two synchronisations of the device."""
    synchronise(device)
    began = time.perf_counter()
    work()
    synchronise(device)
    return time.perf_counter() - began


def plain_copies(size: int, device: torch.device) -> Copies:
    """Three copies of `size` bytes each way, after one that is not counted; all memory is given back.

    Raises RuntimeError when host memory cannot be pinned: then there is no limit to compare with.
    """
    there = torch.zeros(size, dtype=torch.uint8, device=device)
    mapped = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    mapped.madvise(mmap.MADV_HUGEPAGE)
    here = torch.frombuffer(mapped, dtype=torch.uint8)
    with ThreadPoolExecutor(16) as pool:
        list(pool.map(lambda start: here[start : start + _TOUCHED_AT_ONCE].zero_(), range(0, size, _TOUCHED_AT_ONCE)))
    if device.type == "cpu":
        return _both_ways(there, here, device)
    runtime = torch.cuda.cudart()
    if code := int(runtime.cudaHostRegister(here.data_ptr(), size, 0)):
        raise RuntimeError(f"cannot pin {size} bytes for the limit: cudaHostRegister returned {code}")
    try:
        return _both_ways(there, here, device)
    finally:
        runtime.cudaHostUnregister(here.data_ptr())
        del there
        torch.cuda.empty_cache()


def _both_ways(there: torch.Tensor, here: torch.Tensor, device: torch.device) -> Copies:
    out: list[float] = []
    back: list[float] = []
    for _ in range(_COPIES + 1):
        out.append(timed(device, lambda: here.copy_(there, non_blocking=True)))
        back.append(timed(device, lambda: there.copy_(here, non_blocking=True)))
    return out[1:], back[1:]


def synchronise(device: torch.device) -> None:
    """Wait for all that is queued on the device."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
