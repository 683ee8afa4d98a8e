"""How bytes cross between device and host, and how a device's memory is given back."""

from collections.abc import Callable
from typing import Protocol

import torch

from tidemill.residency import mapped

__all__ = ["CudaTransfer", "HostTransfer", "Transfer", "numbered", "transfer_for"]


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

    def finish(self) -> None:
        """Wait until every copy is complete."""
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

    def finish(self) -> None:
        """Nothing to wait for."""

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

    def finish(self) -> None:
        """Wait for the copying stream."""
        self._stream.synchronize()

    def give_back(self) -> None:
        """Freed memory, cuBLAS workspaces and the allocator's cached blocks."""
        torch.cuda.synchronize(self._device)
        mapped.give_back(self._device)
        torch._C._cuda_clearCublasWorkspaces()
        torch.cuda.empty_cache()


def transfer_for(device: torch.device) -> Transfer:
    """How bytes leave this device."""
    return CudaTransfer(device) if device.type == "cuda" else HostTransfer()


def numbered(device: torch.device) -> torch.device:
    """The device with its number: `cuda` is the current one, now and for good."""
    if device.type == "cuda" and device.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    return device
