import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tidemill.checkpoint.catalog import attempt_folder, checkpoint_name, clean_leftovers, entries, newest, set_aside
from tidemill.contracts.events import Event, Notice
from tidemill.errors import CheckpointError


@pytest.fixture(params=[0, 3])
def ranks(request: pytest.FixtureRequest) -> int:
    """Every layout in one file, and in three."""
    count: int = request.param
    return count


@pytest.fixture
def real(make_rig: Callable[..., Any]) -> Callable[[int], Path]:
    """A real checkpoint of a step."""
    rig = make_rig(every=0, keep_last=0)
    for step in (2, 3, 4, 9, 10, 100):
        rig.run(step)
        rig.manager.save(rig.state)

    def checkpoint(step: int) -> Path:
        return Path(rig.folder) / checkpoint_name(step)

    return checkpoint


def damage(path: Path, how: str) -> None:
    weights = sorted(path.glob("trainer-*"))[-1]
    match how:
        case "0 bytes":
            weights.write_bytes(b"")
        case "one byte changed":
            data = bytearray(weights.read_bytes())
            data[-1] ^= 1
            weights.write_bytes(data)
        case "cut short":
            (path / "manifest.json").unlink()


def test_all_broken_is_an_error_that_names_each_and_never_a_fresh_start(tmp_path: Path, real: Any) -> None:
    folder = tmp_path / "layout"
    shutil.copytree(real(2), folder / "step-00000002")
    shutil.copytree(real(4), folder / "step-00000004")
    damage(folder / "step-00000002", "one byte changed")
    damage(folder / "step-00000004", "cut short")
    with pytest.raises(
        CheckpointError, match=r"step-00000004: manifest.json is missing; step-00000002: the checksum of"
    ):
        newest(folder)


def test_without_walk_back_the_newest_must_be_whole(tmp_path: Path, real: Any) -> None:
    folder = tmp_path / "layout"
    shutil.copytree(real(2), folder / "step-00000002")
    shutil.copytree(real(4), folder / "step-00000004")
    damage(folder / "step-00000004", "0 bytes")
    with pytest.raises(CheckpointError, match=r"step-00000004: .* has 0 of \d+ bytes.*checkpoint\.walk_back"):
        newest(folder, walk_back=False)


def test_a_copy_under_another_number_is_not_taken_for_it(tmp_path: Path, real: Any) -> None:
    shutil.copytree(real(2), tmp_path / "layout" / "step-00000009")
    with pytest.raises(CheckpointError, match="that of step 2"):
        newest(tmp_path / "layout")


def test_a_later_format_is_never_walked_past(tmp_path: Path, real: Any) -> None:
    shutil.copytree(real(2), tmp_path / "layout" / "step-00000002")
    later = tmp_path / "layout" / "step-00000003"
    later.mkdir()
    (later / "manifest.json").write_text(json.dumps({"format": 99, "release": "7.0.0"}))
    with pytest.raises(CheckpointError, match=r"tidemill 7\.0\.0 or later"):
        newest(tmp_path / "layout")


def test_of_two_names_of_one_step_the_padded_one_counts(tmp_path: Path, real: Any) -> None:
    shutil.copytree(real(2), tmp_path / "layout" / "step-2")
    shutil.copytree(real(2), tmp_path / "layout" / "step-00000002")
    assert [entry.path.name for entry in entries(tmp_path / "layout")] == ["step-2", "step-00000002"]


def test_what_is_set_aside_frees_its_number_and_twice_is_no_clash(tmp_path: Path, real: Any) -> None:
    folder = tmp_path / "layout"
    for _ in range(2):
        shutil.copytree(real(2), folder / "step-00000002", dirs_exist_ok=True)
        shutil.copytree(real(4), folder / "step-00000004")
        damage(folder / "step-00000004", "one byte changed")
        set_aside(newest(folder)[1], 3)
    names = sorted(path.name for path in folder.iterdir())
    assert names == ["step-00000002", "step-00000004-1.aside-3", "step-00000004.aside-3"]


def test_leftovers_of_attempts_go_and_nothing_else(tmp_path: Path) -> None:
    stay = ["step-00000003.aside-1", "step-00000003", "mine.tmp", "step-3.tmp"]
    for name in [*stay, attempt_folder(tmp_path, 3, 2).name, "step-00000003.2.trash", "step-00000003.2-1.trash"]:
        (tmp_path / name / "inner").mkdir(parents=True)
    clean_leftovers(tmp_path, lambda event: None)
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(stay)


def test_a_leftover_that_cannot_be_removed_is_a_warning(tmp_path: Path) -> None:
    events: list[Event] = []
    (tmp_path / "step-00000003.2.tmp").write_text("a file where a folder should be")
    clean_leftovers(tmp_path, events.append)
    assert isinstance(events[0], Notice) and events[0].level == "warning"


def test_a_file_that_cannot_be_read_says_nothing_about_the_checkpoint(tmp_path: Path, real: Any) -> None:
    folder = tmp_path / "layout"
    shutil.copytree(real(2), folder / "step-00000002")
    shutil.copytree(real(4), folder / "step-00000004")
    (folder / "step-00000004" / "state.json").unlink()
    (folder / "step-00000004" / "state.json").symlink_to("state.json")
    with pytest.raises(CheckpointError, match="no older one is taken"):
        newest(folder)
