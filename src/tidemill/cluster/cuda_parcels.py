"""Weights handed to another process on the same GPU: a buffer that is copied from where it lies.

Only these buffers are shared, never a weight: a handle must not outlive the memory behind it, and a tenant's memory
goes with its sleep. A parcel's receiver copies, waits for the copy and lets go before it answers, so that an answer
means that the buffer may be written again. Two buffers are used in turn: one is filled while the other is read.
"""

import contextlib
import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from tidemill.errors import WeightSyncError

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["SharedBuffer", "SharedStaging", "opened"]


@dataclass(frozen=True, kw_only=True)
class SharedBuffer:
    """What another process opens a buffer by. `used` bytes of it are written; the rest is PyTorch's own, unread."""

    used: int
    handle: bytes
    size: int
    offset: int
    counter_file: bytes
    counter: int


class SharedStaging:
    """A ring of two buffers of `size` bytes on the device of the first weight."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._slots: list[tuple[Tensor, SharedBuffer]] = []
        self._turn = 1

    def buffer(self, device: torch.device) -> "Tensor":
        """The buffer whose turn it is. Its last reader must have let go."""
        self._turn = 1 - self._turn
        if self._turn == len(self._slots):
            self._slots.append(_shared_slot(self._size, device))
        return self._slots[self._turn][0]

    def payload(self, used: int) -> object:
        """The way to the first `used` bytes; everything queued on the device is done first."""
        if not used:
            return SharedBuffer(used=0, handle=b"", size=0, offset=0, counter_file=b"", counter=0)
        flat, shared = self._slots[self._turn]
        torch.cuda.synchronize(flat.device)
        return dataclasses.replace(shared, used=used)

    def close(self) -> None:
        """Free both. Readers have let go by now, or their processes are gone."""
        while self._slots:
            flat, shared = self._slots.pop()
            # PyTorch keeps a buffer for a reader that never came: after a failure that would be for ever.
            torch.UntypedStorage._release_ipc_counter(  # type: ignore[no-untyped-call]
                shared.counter_file, shared.counter, device=flat.device
            )
            del flat
        torch.cuda.ipc_collect()  # type: ignore[no-untyped-call]


def _shared_slot(size: int, device: torch.device) -> "tuple[Tensor, SharedBuffer]":
    flat = torch.empty(size, dtype=torch.uint8, device=device)
    try:
        shared = flat.untyped_storage()._share_cuda_()  # type: ignore[no-untyped-call]
    except RuntimeError as cause:
        raise WeightSyncError(
            f"cannot share {size} bytes of {device} with the engine's process: {cause}; if PYTORCH_CUDA_ALLOC_CONF has "
            "expandable_segments:True, leave it out"
        ) from cause
    # The last two are an event to wait for: a payload is handed out when nothing is left to wait for.
    _, handle, nbytes, offset, counter_file, counter, _, _ = shared
    described = SharedBuffer(
        used=0, handle=handle, size=nbytes, offset=offset, counter_file=counter_file, counter=counter
    )
    return flat, described


@contextlib.contextmanager
def opened(shared: SharedBuffer) -> "Iterator[Tensor]":
    """The written bytes as they lie on the other process's side, on this process's GPU, flat uint8, for the block.

    Nothing of it may be kept: at the block's end its copies are waited for, and the memory is let go.
    """
    if not shared.used:
        yield torch.empty(0, dtype=torch.uint8, device="cuda")
        return
    torch.cuda.init()  # type: ignore[no-untyped-call]
    device = torch.cuda.current_device()
    storage = torch.UntypedStorage._new_shared_cuda(
        device,
        shared.handle,
        shared.size,
        shared.offset,
        shared.counter_file,
        shared.counter,
        b"",
        False,
    )
    flat = torch.empty(0, dtype=torch.uint8, device=f"cuda:{device}").set_(storage, 0, (shared.used,), (1,))
    try:
        yield flat
    finally:
        torch.cuda.synchronize(device)
        del flat, storage
