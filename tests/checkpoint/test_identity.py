"""What a checkpoint is bound to (`tidemill.checkpoint.identity`)."""

from pathlib import Path

import pytest

from tidemill.checkpoint.identity import check_identity, check_newest
from tidemill.checkpoint.manifest import MANIFEST, Manifest
from tidemill.errors import CheckpointError

MINE = {"model": "a", "data": "rows", "seed": "0"}


def manifest(folder: Path, step: int, identity: dict[str, str]) -> Path:
    path = folder / f"step-{step:08d}" / MANIFEST
    path.parent.mkdir(parents=True)
    made = Manifest(
        step=step, attempt=1, parts=(), files=(), identity=identity, settings={}, retention={}, versions={}, time=0.0
    )
    path.write_bytes(made.to_bytes())
    return path


@pytest.mark.parametrize("saved", [{**MINE, "data": "others"}, {"model": "a", "data": "rows"}, {**MINE, "judge": "x"}])
def test_whatever_differs_is_refused_by_name_unless_accepted_by_name(tmp_path: Path, saved: dict[str, str]) -> None:
    (name,) = (key for key in {**MINE, **saved} if MINE.get(key) != saved.get(key))
    with pytest.raises(CheckpointError, match=rf'its {name} is .*checkpoint.accept = \["{name}"\]'):
        check_identity(tmp_path, saved, MINE, accept=())
    check_identity(tmp_path, saved, MINE, accept=[name])


def test_the_newest_that_says_what_it_is_decides(tmp_path: Path) -> None:
    check_newest(tmp_path / "none", MINE, accept=())
    manifest(tmp_path, 2, {**MINE, "seed": "9"})
    manifest(tmp_path, 4, MINE)
    check_newest(tmp_path, MINE, accept=())
    newest = manifest(tmp_path, 6, {**MINE, "seed": "7"})
    with pytest.raises(CheckpointError, match="step-00000006: its seed is 7, this run's is 0"):
        check_newest(tmp_path, MINE, accept=())
    newest.write_bytes(newest.read_bytes()[:-9])
    check_newest(tmp_path, MINE, accept=())
