"""Counting of leases (`tidemill.residency.occupancy`)."""

import threading

import pytest

from tidemill.contracts.footprint import Part
from tidemill.errors import ResidencyError
from tidemill.residency.occupancy import Occupant
from tidemill.testing.fakes.device import FakeTenant


@pytest.fixture
def occupant() -> Occupant:
    return Occupant(FakeTenant("engine", {Part.WEIGHTS: 100, Part.KV_CACHE: 50}, keeps=Part.ALL))


def test_a_part_stays_open_until_its_last_lease_ends(occupant: Occupant) -> None:
    me, gate = threading.get_ident(), occupant.tenant.gate
    occupant.take(Part.WEIGHTS)
    occupant.take(Part.WEIGHTS | Part.KV_CACHE)
    occupant.give_back(Part.WEIGHTS | Part.KV_CACHE, me)
    gate.check(Part.WEIGHTS, "load")
    with pytest.raises(ResidencyError):
        gate.check(Part.KV_CACHE, "generate")
    assert occupant.in_use
    occupant.give_back(Part.WEIGHTS, me)
    assert not occupant.in_use
    with pytest.raises(ResidencyError):
        gate.check(Part.WEIGHTS, "load")


def test_it_is_known_whether_another_thread_holds_a_lease(occupant: Occupant) -> None:
    thread = threading.Thread(target=occupant.take, args=(Part.WEIGHTS,))
    thread.start()
    thread.join(timeout=10)
    assert occupant.used_by_others()
    occupant.take(Part.WEIGHTS)
    occupant.give_back(Part.WEIGHTS, thread.ident or 0)
    assert not occupant.used_by_others()


def test_bytes_count_what_is_awake_and_what_would_be(occupant: Occupant) -> None:
    assert (occupant.device_bytes, occupant.bytes_with(Part.WEIGHTS)) == (0, 100)
    occupant.tenant.wake_up(Part.WEIGHTS)
    assert (occupant.device_bytes, occupant.bytes_with(Part.KV_CACHE)) == (100, 150)
