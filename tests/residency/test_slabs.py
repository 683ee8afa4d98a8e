"""Device memory of ours (`tidemill.residency.slabs`)."""

import weakref

import numpy as np
import torch

from tidemill.contracts.footprint import Part
from tidemill.residency.device_memory import ResizedStorage
from tidemill.residency.ledger import Entry
from tidemill.residency.packing import plan_slabs
from tidemill.residency.registration import Registration
from tidemill.residency.slabs import Slab, build_slabs

CPU = torch.device("cpu")


def build(registration: Registration) -> tuple[list[Slab], list[Entry]]:
    moving = [*registration.items(), *registration.bases()]
    plans, entries = plan_slabs(moving, page_bytes=1 << 20)
    return build_slabs(plans, moving, make_memory=ResizedStorage, device=CPU, make_room=lambda sizes: None), entries


def test_moving_frees_the_old_storage() -> None:
    array = np.ones(1000, dtype=np.float32)
    alive = weakref.ref(array)
    parameter = torch.nn.Parameter(torch.from_numpy(array))
    nothing = parameter.detach()[:0]
    del array
    registration = Registration(CPU)
    registration.add("w", parameter, Part.WEIGHTS)
    registration.add("none", nothing, Part.WEIGHTS)
    build(registration)
    assert alive() is None
    assert parameter.sum().item() == 1000


def test_a_registered_view_takes_its_base_along() -> None:
    flat = torch.arange(10.0)
    view = flat[2:5]
    registration = Registration(CPU)
    registration.add("view", view, Part.WEIGHTS)
    slabs, entries = build(registration)
    flat[3] = 30.0
    assert view.tolist() == [2.0, 30.0, 4.0]
    assert [entry.name for entry in entries] == ["view", "view, its base"]
    assert flat.untyped_storage().data_ptr() == slabs[0].memory.flat.data_ptr()
