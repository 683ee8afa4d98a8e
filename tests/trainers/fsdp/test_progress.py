"""tidemill.trainers.fsdp.progress"""

from typing import Any

import pytest

from tidemill.errors import CheckpointError
from tidemill.trainers.fsdp.progress import Progress


def test_counts_survive_a_checkpoint_and_other_keys_are_left_alone() -> None:
    progress = Progress(phase="rl").advance(optimizer_steps=4).advance(optimizer_steps=8)
    assert (progress.updates, progress.optimizer_steps) == (2, 8)
    assert Progress.from_json(progress.to_json() | {"total_steps": 300}) == progress


@pytest.mark.parametrize(
    "change",
    [{"phase": None}, {"phase": 3}, {"updates": -1}, {"updates": 1.5}, {"optimizer_steps": None}, {"updates": True}],
)
def test_what_cannot_be_a_count_is_refused(change: dict[str, Any]) -> None:
    with pytest.raises(CheckpointError, match="use an older checkpoint"):
        Progress.from_json(Progress(phase="rl").to_json() | change)
