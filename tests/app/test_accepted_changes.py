"""tidemill.app.accepted_changes: which cursors an accepted change of data or seed moves, and what is said of it."""

from dataclasses import replace

import pytest

from tidemill.app.accepted_changes import AcceptedChanges, as_it_is
from tidemill.contracts.events import Event, Notice
from tidemill.contracts.state import Cursor, RunState

STATE = RunState(
    step=7,
    attempt=2,
    seed=1,
    cursor=Cursor(epoch=3, position=5, digest="former"),
    warm_up_cursor=Cursor(epoch=0, position=9, digest="former"),
)


def next_epoch(cursor: Cursor) -> Cursor:
    return Cursor(epoch=cursor.epoch + 1)


def changed(*accept: str, warm_up_steps: int = 10, events: list[Event] | None = None) -> RunState:
    told: list[Event] = [] if events is None else events
    changes = AcceptedChanges(
        accept=accept, prompts=next_epoch, demonstrations=next_epoch, warm_up_steps=warm_up_steps, emit=told.append
    )
    return changes(STATE)


@pytest.mark.parametrize(
    ("accept", "moved"),
    [
        ((), set()),
        (("model", "tokenizer"), set()),
        (("data",), {"cursor"}),
        (("warm_up",), {"warm_up_cursor"}),
        (("seed",), {"cursor", "warm_up_cursor"}),
    ],
)
def test_only_what_was_accepted_moves_to_its_next_epoch(accept: tuple[str, ...], moved: set[str]) -> None:
    state = changed(*accept)
    assert state.cursor == (Cursor(epoch=4) if "cursor" in moved else STATE.cursor)
    assert state.warm_up_cursor == (Cursor(epoch=1) if "warm_up_cursor" in moved else STATE.warm_up_cursor)
    assert replace(state, cursor=STATE.cursor, warm_up_cursor=STATE.warm_up_cursor) == STATE


def test_demonstrations_of_a_phase_that_is_over_are_left_alone() -> None:
    events: list[Event] = []
    assert changed("seed", "warm_up", warm_up_steps=7, events=events).warm_up_cursor == STATE.warm_up_cursor
    assert len(events) == 1


def test_a_warning_says_what_is_skipped_and_what_comes_again() -> None:
    events: list[Event] = []
    changed("data", events=events)
    (notice,) = events
    assert isinstance(notice, Notice) and notice.level == "warning"
    for words in ("step 7", "begins epoch 4", "left of epoch 3 is skipped", "5 rows"):
        assert words in notice.text


def test_a_cursor_that_fits_stays_in_silence() -> None:
    events: list[Event] = []
    changes = AcceptedChanges(
        accept=("data", "seed"), prompts=as_it_is, demonstrations=as_it_is, warm_up_steps=9, emit=events.append
    )
    assert changes(STATE) == STATE
    assert events == []
