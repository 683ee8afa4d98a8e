"""How bytes cross between device and host, and how a device's memory is given back."""

import contextlib
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol, TypeVar

import torch

from tidemill.residency import mapped
from tidemill.residency.workspaces import free_workspaces
from tidemill.units import MIB

__all__ = ["CudaTransfer", "HostTransfer", "Pair", "Transfer", "in_blocks", "numbered", "transfer_for"]

T = TypeVar("T")

Pair = tuple[torch.Tensor, torch.Tensor]
"""Target and source, flat uint8."""

# 4 GiB of an H200 in pieces of 64, 256 and 1024 MiB took 5.1, 1.5, 0.8 ms to get, and 4.9, 2.8, 2.4 ms to give back.
_BLOCK_BYTES = 512 * MIB
# What PyTorch's allocator takes from other blocks than larger storages, and what it rounds up to.
_LARGE, _ALIGNMENT = MIB, 512


class Transfer(Protocol):
    """Copies between slabs and pages. `begin`, any number of `copy`, `finish`: only then are the bytes there."""

    def quiet(self) -> None:
        """Wait for the work already queued on the device, but not for copies."""
        ...

    def begin(self) -> None:
        """Order the copies after all work already queued on the device."""
        ...

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Start copying flat uint8 `source` to `target`."""
        ...

    def mark(self) -> Callable[[], None]:
        """What returns, in any thread, when all copies started so far are complete."""
        ...

    def copy_all(self, groups: Iterable[Iterable[Pair]]) -> list[Callable[[], None]]:
        """`copy` of every pair in every group, and a `mark` behind each group: of many, faster than one by one."""
        ...

    def finish(self) -> None:
        """Wait until every copy is complete."""
        ...

    def reserve(self, sizes: Sequence[int]) -> None:
        """Room for storages of these bytes, which are about to be made, in few pieces. It need not be there."""
        ...

    def give_back(self) -> None:
        """Return to the device what its allocator keeps for later."""
        ...


class HostTransfer:
    """Copies within host memory: done when `copy` returns."""

    def quiet(self) -> None:
        """Nothing is queued on a CPU."""

    def begin(self) -> None:
        """Nothing is queued on a CPU."""

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Copy now."""
        target.copy_(source)

    def mark(self) -> Callable[[], None]:
        """Complete already."""
        return self.finish

    def copy_all(self, groups: Iterable[Iterable[Pair]]) -> list[Callable[[], None]]:
        """One by one."""
        return [self._copied(group) for group in groups]

    def _copied(self, group: Iterable[Pair]) -> Callable[[], None]:
        for target, source in group:
            self.copy(target, source)
        return self.mark()

    def finish(self) -> None:
        """Nothing to wait for."""

    def reserve(self, sizes: Sequence[int]) -> None:
        """The system takes no longer for many."""

    def give_back(self) -> None:
        """The C library keeps no large block."""


class CudaTransfer:
    """Asynchronous copies on a stream of their own; host memory must be pinned, else they are slow."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def quiet(self) -> None:
        """Wait for the current stream."""
        torch.cuda.current_stream(self._device).synchronize()

    def begin(self) -> None:
        """Wait, on the copying stream, for what the current stream has queued."""
        self._stream.wait_stream(torch.cuda.current_stream(self._device))

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Queue one copy."""
        with torch.cuda.stream(self._stream):
            target.copy_(source, non_blocking=True)

    def mark(self) -> Callable[[], None]:
        """An event behind what is queued; waited for by the host, so that every stream may use the bytes then."""
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(self._stream)
        wait: Callable[[], None] = event.synchronize
        return wait

    def copy_all(self, groups: Iterable[Iterable[Pair]]) -> list[Callable[[], None]]:
        """Queue all, on a stream that is chosen once: to choose it takes as long as to queue a copy."""
        with torch.cuda.stream(self._stream):
            return [self._queued(group) for group in groups]

    def _queued(self, group: Iterable[Pair]) -> Callable[[], None]:
        for target, source in group:
            target.copy_(source, non_blocking=True)
        return self.mark()

    def finish(self) -> None:
        """Wait for the copying stream."""
        self._stream.synchronize()

    def reserve(self, sizes: Sequence[int]) -> None:
        """Blocks that the allocator then cuts: the driver takes, and later gives back, 64 MiB as slowly as many more.

        Where there is no room for a block, each storage is on its own.
        """
        blocks = []
        with contextlib.suppress(torch.OutOfMemoryError):
            for group in in_blocks([size for size in sizes if size > _LARGE], lambda size: size):
                size = sum(-(-size // _ALIGNMENT) * _ALIGNMENT for size in group)
                blocks.append(torch.empty(size, dtype=torch.uint8, device=self._device))

    def give_back(self) -> None:
        """Freed memory, cuBLAS workspaces and the allocator's cached blocks."""
        torch.cuda.synchronize(self._device)
        mapped.give_back(self._device)
        free_workspaces()
        torch.cuda.empty_cache()


def in_blocks(items: Iterable[T], size: Callable[[T], int]) -> list[list[T]]:
    """`items`, in order, as many together as make a block of the allocator; a larger one is alone."""
    groups: list[list[T]] = []
    filled = _BLOCK_BYTES
    for item in items:
        if filled + size(item) > _BLOCK_BYTES:
            groups.append([])
            filled = 0
        groups[-1].append(item)
        filled += size(item)
    return groups


def transfer_for(device: torch.device) -> Transfer:
    """How bytes leave this device."""
    return CudaTransfer(device) if device.type == "cuda" else HostTransfer()


def numbered(device: torch.device) -> torch.device:
    """The device with its number: `cuda` is the current one, now and for good."""
    if device.type == "cuda" and device.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    return device
