"""Device memory that comes and goes (`tidemill.residency.device_memory`)."""

import pytest
import torch
from tests.residency.savers.kinds import KINDS, Kind

from tidemill.errors import ResidencyError
from tidemill.residency.device_memory import DeviceMemory, ResizedStorage, kept_addresses


@pytest.mark.parametrize("kind", KINDS)
def test_memory_comes_and_goes_behind_the_same_tensor(kind: Kind) -> None:
    memory: DeviceMemory = kind.make_memory(1000, torch.device(kind.device))
    flat = memory.flat
    view = flat[8:16].view(torch.int64)
    for value in range(3):
        assert memory.resident
        view.fill_(value)
        assert flat[8].item() == value
        memory.check_can_free()
        memory.free()
        memory.free()
        assert not memory.resident
        memory.allocate()
        assert memory.flat is flat and len(flat) == 1000


def test_an_emptied_storage_holds_no_byte_and_comes_back_at_full_size() -> None:
    memory = ResizedStorage(1000, torch.device("cpu"))
    memory.free()
    assert memory.flat.untyped_storage().nbytes() == 0
    memory.allocate()
    assert memory.flat.untyped_storage().nbytes() == 1000


def test_memory_that_numpy_holds_says_so() -> None:
    memory = ResizedStorage(1000, torch.device("cpu"))
    memory.flat.numpy()
    with pytest.raises(ResidencyError, match="clone"):
        memory.check_can_free()


def test_a_device_that_cannot_keep_addresses_says_so() -> None:
    with pytest.raises(ResidencyError, match="cannot keep addresses on cpu.*unset trainer.keep_addresses"):
        kept_addresses(torch.device("cpu"))
