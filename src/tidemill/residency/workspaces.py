"""The memory that cuBLAS works in: tens of MiB a stream, which PyTorch keeps until it is told to free it.

A sleep frees it, unless somebody in this process has captured CUDA graphs: a graph holds addresses, and a matrix
product in it would write into memory that is gone, or somebody else's.
"""

import threading
from collections.abc import Callable

import torch

__all__ = ["free_workspaces", "hold_workspaces"]

_holders: set[object] = set()
_lock = threading.Lock()


def hold_workspaces() -> Callable[[], None]:
    """From now on, for as long as graphs may be replayed, nothing frees them; what comes back is called at the end."""
    holder = object()
    with _lock:
        _holders.add(holder)

    def let_go() -> None:
        with _lock:
            _holders.discard(holder)

    return let_go


def free_workspaces() -> None:
    """Of all devices, if nobody holds them. Nothing may be running that works in them."""
    with _lock:
        if not _holders:
            torch._C._cuda_clearCublasWorkspaces()
