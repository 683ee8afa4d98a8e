from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tidemill.checkpoint.attempts import next_attempt
from tidemill.errors import CheckpointError
from tidemill.faults import armed


def test_each_start_counts_one_more(tmp_path: Path) -> None:
    assert [next_attempt(tmp_path) for _ in range(3)] == [1, 2, 3]


@pytest.mark.parametrize("garbled", ["", "x", "-5", None])
def test_a_lost_counter_is_made_up_for_by_checkpoints(
    tmp_path: Path, make_rig: Callable[..., Any], garbled: str | None
) -> None:
    make_rig(attempt=41).run(2)
    if garbled is not None:
        (tmp_path / "attempt").write_text(garbled)
    assert next_attempt(tmp_path) == 42


@pytest.mark.parametrize("name", ["step-00000002.7.tmp", "step-00000002.aside-7", "step-00000002.7.trash"])
def test_leftovers_count_too(tmp_path: Path, name: str) -> None:
    (tmp_path / "checkpoints" / name).mkdir(parents=True)
    assert next_attempt(tmp_path) == 8


def test_broken_checkpoints_and_other_names_do_not_count(tmp_path: Path) -> None:
    for name in ("step-00000002", "step-00000003.tmp", "notes.9"):
        (tmp_path / "checkpoints" / name).mkdir(parents=True)
    assert next_attempt(tmp_path) == 1


@pytest.mark.parametrize("fault", ["attempt.write", "attempt.fsync-file"])
def test_a_full_disk_is_said_and_the_counter_stays(tmp_path: Path, fault: str) -> None:
    next_attempt(tmp_path)
    with armed(f"{fault}=disk-full"), pytest.raises(CheckpointError, match="cannot count this start"):
        next_attempt(tmp_path)
    assert next_attempt(tmp_path) == 2


def test_a_counter_that_cannot_be_read_is_said(tmp_path: Path) -> None:
    (tmp_path / "attempt").mkdir()
    with pytest.raises(CheckpointError, match="cannot count this start"):
        next_attempt(tmp_path)
