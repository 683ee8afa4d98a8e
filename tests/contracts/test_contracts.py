"""The frozen values: tidemill.contracts.sample, .state, .footprint, .batch, .events, .checkpoint, .parts, ..."""

import pickle
from dataclasses import FrozenInstanceError, replace

import pytest

from tidemill import errors
from tidemill.contracts.events import PhaseDone, phase
from tidemill.contracts.footprint import Part
from tidemill.contracts.sample import Prompt, StopReason, Trajectory
from tidemill.contracts.state import Cursor, PolicyVersion, RunState

STATE = RunState(step=3, attempt=2, seed=7, cursor=Cursor(epoch=1, position=2, digest="d"), warm_up_cursor=Cursor())


def test_the_state_is_a_value_that_goes_through_json_unchanged() -> None:
    assert RunState.from_json(STATE.to_json()) == STATE
    with pytest.raises(FrozenInstanceError):
        STATE.step = 4  # type: ignore[misc]


def test_a_state_advances_by_one_update_and_keeps_the_other_cursor() -> None:
    later = STATE.advance(cursor=Cursor(position=9))
    assert (later.step, later.cursor.position, later.warm_up_cursor) == (4, 9, STATE.warm_up_cursor)
    assert STATE.step == 3


def test_versions_of_a_later_attempt_are_newer_whatever_their_step() -> None:
    assert PolicyVersion(2, 0) > PolicyVersion(1, 99) > PolicyVersion(1, 98)


def test_a_trajectory_whose_lengths_differ_is_refused() -> None:
    prompt = Prompt(id="a", key="0:a", token_ids=(1,), text="a")
    good = Trajectory(
        prompt=prompt,
        sample=0,
        token_ids=(1, 2),
        logprobs=(-1.0, -2.0),
        loss_mask=(True, True),
        version=PolicyVersion(0, 0),
        stop_reason=StopReason.EOS,
    )
    assert (good.id, good.reward) == ("0:a#0", None)
    with pytest.raises(ValueError, match="0:a#0 differ in length"):
        replace(good, logprobs=(-1.0,))


def test_parts_are_named_as_people_say_them() -> None:
    assert (Part.WEIGHTS | Part.KV_CACHE).words() == "weights, kv cache"
    assert (Part.ALL.words(), Part.NONE.words()) == ("all", "nothing")


def test_a_phase_is_recorded_when_its_block_raises_too() -> None:
    seen: list[object] = []
    with pytest.raises(RuntimeError), phase(seen.append, "generate", "engine"):
        raise RuntimeError
    assert isinstance(seen[0], PhaseDone)
    assert (seen[0].name, seen[0].owner) == ("generate", "engine")


@pytest.mark.parametrize("name", errors.__all__)
def test_every_error_takes_a_message_and_pickles(name: str) -> None:
    error = getattr(errors, name)("cannot do it")
    again = pickle.loads(pickle.dumps(error))
    assert (type(again), str(again)) == (type(error), "cannot do it")
    assert isinstance(error, errors.TidemillError | errors.Interrupted)


def test_a_stop_is_no_exception_that_a_plug_in_could_take_for_its_own() -> None:
    assert not issubclass(errors.Interrupted, Exception)
    assert issubclass(errors.Terminated, errors.Interrupted)
    assert issubclass(errors.TidemillError, Exception)
