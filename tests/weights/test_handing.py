"""tidemill.weights.handing"""

from typing import Any

import pytest

from tidemill.contracts.events import Event, PhaseDone
from tidemill.contracts.footprint import Part
from tidemill.contracts.state import PolicyVersion
from tidemill.errors import WeightSyncError
from tidemill.planning.budget import NO_LIMIT
from tidemill.residency.manager import LeaseManager
from tidemill.testing.fakes.device import FakeTenant
from tidemill.weights.handing import handing_over

VERSION = PolicyVersion(1, 7)


@pytest.fixture
def engine() -> Any:
    return FakeTenant("engine", {Part.WEIGHTS: 10, Part.KV_CACHE: 90}, keeps=Part.NONE)


def enter(engine: Any, events: list[Event]) -> Any:
    residency = LeaseManager(budget=NO_LIMIT, emit=events.append, deadline=5.0)
    return handing_over(engine, VERSION, residency=residency, emit=events.append)


def test_the_engines_weights_alone_are_awake_within_and_the_time_is_told(engine: Any) -> None:
    events: list[Event] = []
    with enter(engine, events):
        assert engine.resident() == Part.WEIGHTS
    assert [e.name for e in events if isinstance(e, PhaseDone) and e.name == "update_weights"] == ["update_weights"]


def test_a_failure_of_any_kind_is_one_to_bring_the_engine_to_the_version_with_its_cause(engine: Any) -> None:
    cause = OSError("no such link")
    with (
        pytest.raises(
            WeightSyncError, match="cannot bring engine to version .*: OSError: no such link; it refuses"
        ) as e,
        enter(engine, []),
    ):
        raise cause
    assert e.value.__cause__ is cause


def test_what_is_said_of_a_hand_over_already_is_not_said_again_and_an_interrupt_stays_one(engine: Any) -> None:
    for said in (WeightSyncError("one weight differs"), KeyboardInterrupt()):
        with pytest.raises(type(said)) as caught, enter(engine, []):
            raise said
        assert caught.value is said
