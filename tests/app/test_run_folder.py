"""The run folder (`tidemill.app.run_folder`)."""

import json
from pathlib import Path

import pytest

from tidemill.app.run_folder import RunFolder
from tidemill.errors import ConfigError, TidemillError
from tidemill.faults import armed


def test_a_fresh_start_moves_everything_aside_and_overwrites_nothing(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "run")
    assert folder.set_aside() is None
    for number in (1, 2):
        (folder.root / "metrics.jsonl").write_text(f"start {number}")
        (folder.root / "checkpoints").mkdir()
        (folder.root / "lock").write_text("")
        assert folder.set_aside() == folder.root / f"aside-{number}"
    assert (folder.root / "aside-1" / "metrics.jsonl").read_text() == "start 1"
    assert (folder.root / "aside-2" / "metrics.jsonl").read_text() == "start 2"
    assert (folder.root / "lock").exists()


def test_a_run_folder_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="choose another run.dir"):
        RunFolder(tmp_path / "file" / "run")


def test_the_manifest_lists_every_start(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "a run é")
    for attempt in (1, 2):
        folder.write_manifest(settings={"steps": 3}, attempt=attempt, command=["tidemill"], device="cpu")
    manifest = json.loads(folder.manifest.read_text())
    assert [start["attempt"] for start in manifest["starts"]] == [1, 2]
    assert manifest["versions"]["torch"]


def test_a_manifest_of_another_shape_is_begun_anew(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    for garbage in (b'{"starts": 5}', b"[1]", b"\xff\x00"):
        folder.manifest.write_bytes(garbage)
        folder.write_manifest(settings={}, attempt=7, command=[], device="cpu")
        assert [start["attempt"] for start in json.loads(folder.manifest.read_text())["starts"]] == [7]


def test_a_summary_that_cannot_be_written_leaves_the_earlier_one_and_nothing_else(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    folder.write_summary({"steps": 3})
    with pytest.raises(ValueError, match="JSON"):
        folder.write_summary({"steps": float("nan")})
    with armed("run-folder.write=disk-full"), pytest.raises(TidemillError, match="free the disk"):
        folder.write_summary({"steps": 4})
    assert [path.name for path in tmp_path.iterdir()] == ["summary.json"]
    assert json.loads(folder.summary.read_text()) == {"steps": 3}


def test_what_a_run_folder_gets_survives_a_power_cut(tmp_path: Path, synced: list[Path]) -> None:
    folder = RunFolder(tmp_path / "runs" / "first")
    assert synced == [tmp_path, tmp_path / "runs"]
    synced.clear()
    folder.write_manifest(settings={}, attempt=1, command=[], device="cpu")
    folder.write_summary({"steps": 3})
    assert synced == [folder.root / "manifest.tmp", folder.root, folder.root / "summary.tmp", folder.root]
    synced.clear()
    aside = folder.set_aside()
    assert synced == [folder.root, aside, folder.root]
