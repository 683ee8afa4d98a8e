"""tidemill.checkpoint.schedule: when a run saves by itself, and that it goes on in the next epoch from there."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.checkpoint.conftest import MakeRig, Rig

from tidemill.checkpoint.schedule import EpochEnds, SaveSchedule, no_epochs
from tidemill.contracts.events import ignore
from tidemill.contracts.state import Cursor, RunState
from tidemill.data.jsonl import JsonlData
from tidemill.data.prompt_source import PromptsPerStep
from tidemill.data.tokenizer import Tokenizer

START = RunState(step=0, attempt=1, seed=0, cursor=Cursor(), warm_up_cursor=Cursor())
MakeData = Callable[[int], JsonlData]


@pytest.fixture
def rows(tmp_path: Path) -> MakeData:
    """Shuffled prompts of so many rows, read anew, as each start of a run reads them."""
    tokenizer = Tokenizer(Path(__file__).parents[1] / "data" / "tiny_tokenizer")

    def make(count: int) -> JsonlData:
        path = tmp_path / "rows.jsonl"
        path.write_text("".join(json.dumps({"id": f"r{i}", "prompt": f"{i} ="}) + "\n" for i in range(count)))
        return JsonlData(
            path=path,
            tokenizer=tokenizer,
            seed=3,
            shuffle=True,
            max_prompt_tokens=100,
            skip_bad_lines=False,
            emit=ignore,
        )

    return make


def trained(rig: Rig, data: JsonlData, to: int, count: int = 4) -> list[list[str]]:
    """Keys of the prompts of each step up to step `to`."""
    source, keys = PromptsPerStep(data, count), []
    while rig.state.step < to:
        prompts, cursor = source.take(rig.state.cursor)
        keys.append([prompt.key for prompt in prompts])
        rig.trainer.step()
        rig.state = rig.state.advance(cursor=cursor)
        rig.manager.save_if_due(rig.state)
    rig.manager.drain()
    return keys


def test_a_save_is_due_at_the_step_that_reaches_the_end_of_an_epoch(make_rig: MakeRig, rows: MakeData) -> None:
    data = rows(10)
    rig = make_rig(every=0, keep_last=99, epochs=EpochEnds(prompts=10, demonstrations=0))
    rig.restore()
    trained(rig, data, 11)
    # Rows consumed: 4 8 12 16 20 24 28 32 36 40 44. Step 5 ends its epoch exactly, step 3 and 8 reach over the border.
    assert rig.statuses("durable") == [3, 5, 8, 10]


@pytest.mark.parametrize("row_count", [8, 10])
def test_a_resume_from_the_end_of_an_epoch_goes_on_in_the_next(
    make_rig: MakeRig, rows: MakeData, tmp_path: Path, row_count: int
) -> None:
    ends = EpochEnds(prompts=row_count, demonstrations=0)
    whole = make_rig(tmp_path / "whole", every=0, epochs=ends)
    whole.restore()
    uninterrupted = trained(whole, rows(row_count), 6)
    saved = [step for step in whole.statuses("durable") if step <= 6]
    assert saved == ([2, 4, 6] if row_count == 8 else [3, 5])
    for step in saved[:2]:
        folder = tmp_path / f"killed at {step}"
        first = make_rig(folder, every=0, epochs=ends)
        first.restore()
        trained(first, rows(row_count), step)
        second = make_rig(folder, every=0, epochs=ends, attempt=2)
        state = second.restore()
        assert state is not None and state.step == step
        assert trained(second, rows(row_count), 6) == uninterrupted[step:]
        assert second.statuses("durable") == [later for later in saved if later > step]
        assert second.state.cursor == whole.state.cursor


def test_the_state_that_a_run_goes_on_from_is_no_end_of_its_own() -> None:
    schedule = SaveSchedule(every=0, last_step=99, epochs=EpochEnds(prompts=4, demonstrations=0))
    state = replace(START, step=7, cursor=Cursor(epoch=3, position=4))
    schedule.start(state)
    assert not schedule.is_due(replace(state, step=8))
    assert schedule.is_due(replace(state, step=9, cursor=Cursor(epoch=6, position=1)))
    assert not schedule.is_due(replace(state, step=10, cursor=Cursor(epoch=6, position=2)))


def test_epochs_of_demonstrations_count_too() -> None:
    schedule = SaveSchedule(every=0, last_step=99, epochs=EpochEnds(prompts=10, demonstrations=3))
    due = [
        step
        for step in range(1, 8)
        if schedule.is_due(
            replace(START, step=step, warm_up_cursor=Cursor(epoch=(step - 1) // 3, position=step % 3 or 3))
        )
    ]
    assert due == [3, 6]


@given(st.integers(1, 7), st.integers(0, 9), st.integers(1, 30), st.booleans())
def test_every_so_many_steps_the_last_one_and_ends_of_epochs(every: int, rows: int, last: int, ends: bool) -> None:
    """Against the plain rule, with one row a step."""
    epochs = EpochEnds(prompts=rows, demonstrations=0) if ends else no_epochs
    schedule = SaveSchedule(every=every, last_step=last, epochs=epochs)
    for step in range(1, 31):
        cursor = Cursor(epoch=(step - 1) // rows, position=(step - 1) % rows + 1) if rows else Cursor()
        slow = step % every == 0 or step == last or (ends and rows > 0 and step % rows == 0)
        assert schedule.is_due(replace(START, step=step, cursor=cursor)) == slow
