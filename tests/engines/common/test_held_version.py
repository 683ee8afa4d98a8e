import pytest

from tidemill.contracts.state import PolicyVersion
from tidemill.engines.common.held_version import HeldVersion
from tidemill.errors import WeightSyncError

FIRST, SECOND = PolicyVersion(1, 0), PolicyVersion(1, 1)


def taken(version: PolicyVersion) -> HeldVersion:
    held = HeldVersion()
    held.begin()
    with held.loading():
        pass
    held.check(version, [])
    held.take(version)
    return held


def test_a_version_is_known_from_its_publication_until_the_next_update_or_sleep() -> None:
    held = taken(FIRST)
    assert held.known() == held.version == FIRST
    for lose in (held.begin, held.forget):
        lose()
        assert held.version is None
        with pytest.raises(WeightSyncError, match="unknown"):
            held.known()


def test_a_load_that_fails_ends_the_update() -> None:
    held = HeldVersion()
    held.begin()
    with pytest.raises(OSError), held.loading():
        raise OSError("gone")
    with pytest.raises(WeightSyncError, match="begin_update"), held.loading():
        pass
    with pytest.raises(WeightSyncError, match="whole set"):
        held.check(FIRST, [])


def test_nothing_missing_is_published_and_no_version_goes_back() -> None:
    held = taken(SECOND)
    held.begin()
    with pytest.raises(WeightSyncError, match="2 did not come, among them a, b"):
        held.check(SECOND, ["a", "b"])
    with pytest.raises(WeightSyncError, match="never go back"):
        held.check(FIRST, [])
    held.check(SECOND, [])
