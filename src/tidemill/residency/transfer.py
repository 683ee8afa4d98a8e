"""How bytes cross between device and host, and how a device's memory is given back."""

from typing import Protocol

import torch

__all__ = ["CudaTransfer", "HostTransfer", "Transfer"]


class Transfer(Protocol):
    """Copies between slabs and pages. `begin`, any number of `copy`, `finish`: only then are the bytes there."""

    def begin(self) -> None:
        """Order the copies after all work already queued on the device."""
        ...

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Start copying flat uint8 `source` to `target`."""
        ...

    def finish(self) -> None:
        """Wait until every copy is complete."""
        ...

    def give_back(self) -> None:
        """Return to the device what its allocator keeps for later."""
        ...


class HostTransfer:
    """Copies within host memory: done when `copy` returns."""

    def begin(self) -> None:
        """Nothing is queued on a CPU."""

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Copy now."""
        target.copy_(source)

    def finish(self) -> None:
        """Nothing to wait for."""

    def give_back(self) -> None:
        """The C library keeps no large block."""


class CudaTransfer:
    """Asynchronous copies on a stream of their own; host memory must be pinned, else they are slow."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def begin(self) -> None:
        """Wait, on the copying stream, for what the current stream has queued."""
        self._stream.wait_stream(torch.cuda.current_stream(self._device))

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Queue one copy."""
        with torch.cuda.stream(self._stream):
            target.copy_(source, non_blocking=True)

    def finish(self) -> None:
        """Wait for the copying stream."""
        self._stream.synchronize()

    def give_back(self) -> None:
        """Drop cuBLAS workspaces and the allocator's cached blocks."""
        torch.cuda.synchronize(self._device)
        torch._C._cuda_clearCublasWorkspaces()
        torch.cuda.empty_cache()
