"""The kinds of device memory that a saver must do with, and savers over them."""

from dataclasses import dataclass
from typing import Any

import pytest
import torch

from tidemill.residency.device_memory import MakeDeviceMemory, ResizedStorage
from tidemill.residency.mapped import MappedMemory
from tidemill.residency.savers.host_arena import HostArenaSaver

__all__ = ["KINDS", "RESIZED", "KeptAddress", "Kind", "of_kind"]


class KeptAddress:
    """Memory that is always there, as if its address were kept; what is freed is overwritten with NaN at once."""

    counted = True

    def __init__(self, size: int, device: torch.device) -> None:
        self.flat = torch.empty(size, dtype=torch.uint8, device=device)
        self.resident = True

    def check_can_free(self) -> None:
        """Always."""

    def free(self) -> None:
        """Whoever reads it now reads no number."""
        self.flat.fill_(0xFF)
        self.resident = False

    def allocate(self) -> None:
        """Still of no number."""
        self.resident = True


@dataclass(frozen=True)
class Kind:
    """How memory is made, and on which device."""

    name: str
    make_memory: MakeDeviceMemory
    device: str = "cpu"

    def is_away(self, tensor: torch.Tensor, saver: HostArenaSaver) -> bool:
        """Whether the tensor has no memory."""
        if self.make_memory is ResizedStorage:
            return tensor.untyped_storage().nbytes() == 0
        if self.make_memory is KeptAddress:
            return bool(tensor.detach().clone().reshape(-1).view(torch.uint8).eq(0xFF).all())
        address = tensor.data_ptr()
        (home,) = (slab for slab in saver._crossing.slabs if 0 <= address - slab.memory.flat.data_ptr() < slab.bytes)
        return not home.memory.resident


RESIZED = Kind("resized", ResizedStorage)
_GPU = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
KINDS = [
    pytest.param(RESIZED, id="resized"),
    pytest.param(Kind("kept", KeptAddress), id="kept-address"),
    pytest.param(Kind("resized", ResizedStorage, "cuda"), id="resized-cuda", marks=_GPU),
    pytest.param(Kind("mapped", MappedMemory, "cuda"), id="mapped-cuda", marks=_GPU),
]


def of_kind(kind: Kind, **changes: Any) -> HostArenaSaver:
    """A saver over memory of that kind, with small pages unless said otherwise."""
    settings: dict[str, Any] = {"page_bytes": 1024, "pin": kind.device == "cuda", "deadline": 5.0}
    return HostArenaSaver(device=kind.device, make_memory=kind.make_memory, **settings | changes)
