"""Device memory whose bytes come and go while tensors in it stay objects."""

from typing import Protocol

import torch

from tidemill.errors import ResidencyError
from tidemill.residency.mapped import MappedMemory, can_map

__all__ = ["DeviceMemory", "MakeDeviceMemory", "ResizedStorage", "check_not_lent", "kept_addresses"]


class DeviceMemory(Protocol):
    """Made with its bytes there, of any contents. `counted`: PyTorch's allocator counts them."""

    counted: bool

    @property
    def flat(self) -> torch.Tensor:
        """All of it, flat uint8, always the same tensor; it may be touched while it is resident only."""
        ...

    @property
    def resident(self) -> bool:
        """Whether the bytes are on the device."""
        ...

    def check_can_free(self) -> None:
        """Raises ResidencyError when the memory is lent to somebody who would be left with a dangling pointer."""
        ...

    def free(self) -> None:
        """Give the bytes back. Every tensor in them stays an object without memory."""
        ...

    def allocate(self) -> None:
        """Get bytes again, of any contents. Raises what the allocator raises, and then nothing has changed."""
        ...


class MakeDeviceMemory(Protocol):
    """A kind of device memory."""

    def __call__(self, size: int, device: torch.device) -> DeviceMemory:
        """`size` bytes."""
        ...


class ResizedStorage:
    """One storage of torch's allocator, emptied and filled again: its address may change, its views follow it."""

    counted = True

    def __init__(self, size: int, device: torch.device) -> None:
        self._bytes = size
        self.flat = torch.empty(size, dtype=torch.uint8, device=device)

    @property
    def resident(self) -> bool:
        """See DeviceMemory."""
        return self.flat.untyped_storage().nbytes() > 0

    def check_can_free(self) -> None:
        """See DeviceMemory."""
        check_not_lent(self.flat)

    def free(self) -> None:
        """See DeviceMemory."""
        self.flat.untyped_storage().resize_(0)

    def allocate(self) -> None:
        """See DeviceMemory."""
        self.flat.untyped_storage().resize_(self._bytes)


def check_not_lent(tensor: torch.Tensor) -> None:
    """Raises ResidencyError when the tensor's storage cannot be emptied, for somebody would be left without memory."""
    if not tensor.untyped_storage().resizable():
        raise ResidencyError(
            "a numpy array made by `tensor.numpy()` shares its memory; make it from a copy instead: "
            "`tensor.detach().clone().numpy()`"
        )


def kept_addresses(device: torch.device) -> MakeDeviceMemory:
    """The kind whose addresses outlive it. Raises ResidencyError where there is none.

    Not the kind for all: on one GPU of two it wakes a fiftieth slower, and two tenants swap a fifth slower.
    """
    if not can_map(device):
        raise ResidencyError(
            f"cannot keep addresses on {device}: only CUDA devices with virtual memory management can; unset "
            "trainer.keep_addresses"
        )
    return MappedMemory
