"""Device memory of ours (`tidemill.residency.slabs`)."""

import weakref

import numpy as np
import pytest
import torch

from tidemill.contracts.footprint import Part
from tidemill.errors import ResidencyError
from tidemill.residency.registration import Registration
from tidemill.residency.slabs import Slab, build_slabs

CPU = torch.device("cpu")


def test_an_emptied_slab_holds_no_byte_and_comes_back_at_full_size() -> None:
    slab = Slab(part=Part.WEIGHTS, size=1000, device=CPU)
    slab.empty()
    assert slab.memory.untyped_storage().nbytes() == 0
    assert not slab.resident
    slab.allocate()
    assert slab.memory.untyped_storage().nbytes() == 1000


def test_moving_frees_the_old_storage() -> None:
    array = np.ones(1000, dtype=np.float32)
    alive = weakref.ref(array)
    parameter = torch.nn.Parameter(torch.from_numpy(array))
    nothing = parameter.detach()[:0]
    del array
    registration = Registration(CPU)
    registration.add("w", parameter, Part.WEIGHTS)
    registration.add("none", nothing, Part.WEIGHTS)
    build_slabs(registration.items(), bases=registration.bases(), page_bytes=1 << 20, device=CPU)
    assert alive() is None
    assert parameter.sum().item() == 1000


def test_a_slab_whose_memory_numpy_holds_says_so() -> None:
    slab = Slab(part=Part.WEIGHTS, size=1000, device=CPU)
    slab.memory.numpy()
    with pytest.raises(ResidencyError, match="clone"):
        slab.check_can_empty()


def test_a_registered_view_takes_its_base_along() -> None:
    flat = torch.arange(10.0)
    view = flat[2:5]
    registration = Registration(CPU)
    registration.add("view", view, Part.WEIGHTS)
    slabs, entries = build_slabs(registration.items(), bases=registration.bases(), page_bytes=1 << 20, device=CPU)
    flat[3] = 30.0
    assert view.tolist() == [2.0, 30.0, 4.0]
    assert [entry.name for entry in entries] == ["view"]
    assert flat.untyped_storage().data_ptr() == slabs[0].memory.data_ptr()
