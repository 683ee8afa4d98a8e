"""Folders as others' faults left them: which checkpoint is taken, what is said of the others, and what stays.

Trees are made of real saves under our names. Modules: tidemill.checkpoint.catalog, tidemill.checkpoint.manager.
"""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.checkpoint.damage import DAMAGES, without_part

from tidemill.checkpoint.catalog import checkpoint_name, newest
from tidemill.cli.main import main
from tidemill.contracts.events import Notice

MakeRig = Callable[..., Any]
Saves = Callable[[int], Path]

LAYOUTS = json.loads((Path(__file__).parents[1] / "data" / "checkpoint_layouts.json").read_text())["layouts"]
PARTS = ("trainer", "recorder", "random")
# A pointer file is never read: what is whole and newest counts, by the number in its name.
TAKEN = {
    "numbers are not text": "step-100",
    "newest is cut short": "step-3",
    "pointer lags": "step-4",
    "pointer is empty": "step-2",
    "pointer to nothing": "step-2",
    "no pointer": "step-4",
    "leftovers": "step-2",
    "padded names": "step-0000010",
    "zero bytes": "step-2",
    "one bit flipped": "step-2",
    "half of the parts": "step-2",
    "empty folder": "",
    "folder is missing": "",
}


@pytest.fixture(params=[0, 3])
def ranks(request: pytest.FixtureRequest) -> int:
    """Every layout in one file, and in three."""
    count: int = request.param
    return count


@pytest.fixture
def saves(make_rig: MakeRig) -> Saves:
    """A real save of a step, made when it is asked for; of rising steps."""
    rig = make_rig(every=0, keep_last=0)

    def save(step: int) -> Path:
        path = Path(rig.folder) / checkpoint_name(step)
        if not path.exists():
            rig.run(step)
            rig.manager.save(rig.state)
        return path

    return save


def ours(name: str) -> str:
    return name.replace("step_", "step-").rstrip("/")


def grown(layout: dict[str, Any], folder: Path, saves: Saves) -> Path:
    """The tree that a row of the table describes."""
    if layout["complete"] is not None:
        folder.mkdir()
    for name in layout["complete"] or ():
        shutil.copytree(saves(int(name.strip("/").split("_")[1])), folder / ours(name))
    for name in layout.get("partial", ()):
        step, _, how = ours(name).partition("/")
        shutil.copytree(saves(int(step.partition("-")[2])), folder / step)
        harm(folder / step, how)
    for name in layout.get("other", ()):
        (folder / ours(name)).mkdir() if name.endswith("/") else (folder / ours(name)).write_text("")
    if "pointer" in layout:
        (folder / "latest").write_text(ours(layout["pointer"]))
    return folder


def harm(checkpoint: Path, how: str) -> None:
    weights = sorted(checkpoint.glob("trainer-*"))[-1]
    if "0 bytes" in how:
        DAMAGES["empty"](weights)
    elif "one byte changed" in how:
        DAMAGES["one bit flipped"](weights)
    elif "no rollout" in how:
        without_part(checkpoint, "recorder")
    else:
        DAMAGES["missing"](checkpoint / "manifest.json")


def by_name(layout: dict[str, Any]) -> str:
    return str(layout["name"])


@pytest.mark.parametrize("layout", LAYOUTS, ids=by_name)
def test_c11_the_newest_of_a_tree_is_what_the_table_wants(layout: dict[str, Any], tmp_path: Path, saves: Saves) -> None:
    """C11: by the number in the name, whatever a pointer says."""
    folder = grown(layout, tmp_path / "tree", saves)
    stored, rejected = newest(folder, parts=PARTS)
    assert (stored.path.name if stored else "") == TAKEN[layout["name"]]
    assert [item.entry.path.name for item in rejected] == [
        ours(name.split("/")[0]) for name in layout.get("partial", ())
    ]


@pytest.mark.parametrize("layout", LAYOUTS, ids=by_name)
def test_b01_c11_every_start_on_a_tree_says_what_it_takes_and_goes_on_from_it_and_nothing_whole_is_lost(
    layout: dict[str, Any], tmp_path: Path, saves: Saves, make_rig: MakeRig
) -> None:
    """B01 and C11: over two starts, and a save after them."""
    folder = grown(layout, tmp_path / "tree", saves)
    taken = TAKEN[layout["name"]]
    step = int(taken.partition("-")[2] or 0)
    stay = {ours(name) for name in [*(layout["complete"] or ()), *layout.get("other", ())]}
    for attempt in (3, 4):  # the second start finds what the first one left
        rig = make_rig(folder, every=0, keep_last=0, attempt=attempt)
        rig.restore()
        assert rig.is_at(step)
        said = [event.text for event in rig.events if isinstance(event, Notice)]
        assert any((f"resuming from {taken} " if taken else "starting at step 0") in text for text in said)
        assert stay <= set(rig.names())
    for name in layout.get("partial", ()):
        step_name = ours(name.split("/")[0])
        assert (folder / f"{step_name}.aside-3").is_dir() and not (folder / step_name).exists()
    rig.run(step + 3)
    rig.manager.save(rig.state)
    again = make_rig(folder, attempt=5, keep_last=0)
    again.restore()
    assert again.is_at(step + 3)


@pytest.mark.parametrize("layout", [row for row in LAYOUTS if row.get("partial")], ids=by_name)
def test_what_is_passed_over_is_a_warning_with_its_name_and_what_is_wrong_with_it(
    layout: dict[str, Any], tmp_path: Path, saves: Saves, make_rig: MakeRig
) -> None:
    rig = make_rig(grown(layout, tmp_path / "tree", saves), attempt=2)
    rig.restore()
    (warning,) = rig.warnings()
    assert warning.startswith(f"{ours(layout['partial'][0].split('/')[0])} is not whole and is passed over: ")
    assert warning.rpartition(": ")[2]


@pytest.mark.parametrize("damage", DAMAGES)
def test_b01_whichever_file_of_the_newest_is_harmed_it_is_named_and_the_next_older_is_taken(
    damage: str, tmp_path: Path, saves: Saves, ranks: int
) -> None:
    """B01: missing, empty, cut short, or with one bit flipped."""
    saves(2)
    names = sorted(path.name for path in saves(4).iterdir())
    assert len(names) == 2 + max(ranks, 1)
    for name in names:
        folder = tmp_path / f"{damage} {name}"
        for step in (2, 4):
            shutil.copytree(saves(step), folder / checkpoint_name(step))
        DAMAGES[damage](folder / checkpoint_name(4) / name)
        stored, rejected = newest(folder, parts=PARTS)
        assert stored is not None and stored.state.step == 2
        assert name in rejected[0].reason
        if damage == "missing" and ranks and name.startswith("trainer"):
            assert rejected[0].reason.startswith(f"trainer has 2 of 3 shards, {name} is missing")


@pytest.mark.parametrize("part", PARTS)
def test_c12_a_save_without_one_of_the_parts_is_not_taken_whichever_it_is(
    part: str, tmp_path: Path, saves: Saves, make_rig: MakeRig
) -> None:
    """C12: whole but for that, as two savers that do not wait for each other would leave it."""
    folder = tmp_path / "tree"
    for step in (2, 4):
        shutil.copytree(saves(step), folder / checkpoint_name(step))
    without_part(folder / checkpoint_name(4), part)
    rig = make_rig(folder, attempt=2)
    rig.restore()
    assert rig.is_at(2)
    assert f"the part {part} is missing" in rig.warnings()[0]


@pytest.mark.parametrize("verb", [["ls"], ["verify"], ["export", "--out", "exported"]])
@pytest.mark.parametrize("kind", ["missing", "empty", "file"])
def test_a_folder_that_somebody_named_must_hold_a_save_and_is_never_made(
    verb: list[str], kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    run = tmp_path / "run"
    if kind == "empty":
        (run / "checkpoints").mkdir(parents=True)
    if kind == "file":
        run.write_text("")
    before = sorted(tmp_path.rglob("*"))
    assert main(["ckpt", verb[0], str(run), *verb[1:]]) == 2
    said = {"missing": "is not there", "empty": "no checkpoints in", "file": "is no folder"}[kind]
    assert said in capsys.readouterr().err
    assert sorted(tmp_path.rglob("*")) == before
