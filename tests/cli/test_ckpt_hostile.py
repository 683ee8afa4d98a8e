"""Checkpoint folders that somebody made to harm: no command hangs, ends in a traceback, or says that they hold.

Modules: tidemill.checkpoint.small_files, tidemill.checkpoint.well_typed.
"""

import json
import os
import signal
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.cli.conftest import Ckpt, SavedRun

from tidemill.checkpoint.catalog import newest
from tidemill.checkpoint.manifest import MANIFEST, STATE, _checksum
from tidemill.checkpoint.safetensors_file import checksum
from tidemill.checkpoint.small_files import LARGEST_TEXT

TENSORS = "trainer-00000-of-00001.safetensors"
COMMANDS = (("ls",), ("verify",), ("inspect",), ("inspect", "--tensors"), ("prune", "--dry-run"))
Change = Callable[[dict[str, Any]], object]


@pytest.fixture
def run(saved: SavedRun) -> SavedRun:
    for step in (2, 4):
        saved.save(step, {"model/w": np.arange(6.0, dtype=np.float32).reshape(2, 3)})
    return saved


@pytest.fixture(autouse=True)
def in_time() -> Iterator[None]:
    """What hangs fails."""

    def late(number: int, frame: object) -> None:
        raise TimeoutError("the command hangs")

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(20)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


def seen_as_broken(ckpt: Ckpt, run: SavedRun) -> str:
    """What `verify` says of step 4, once no command has failed on it and a start takes step 2."""
    for words in COMMANDS:
        assert ckpt(words[0], run.folder, *words[1:]) in (0, 1), (words, ckpt.err)
    assert ckpt("diff", run.path(2), run.path(4)) == 1
    assert ckpt("verify", run.folder) == 1
    told = next(line for line in ckpt.out.splitlines() if line.startswith("step-00000004"))
    assert "step-00000002: holds" in ckpt.out and "holds" not in told
    stored, rejected = newest(run.folder / "checkpoints")
    assert stored is not None and stored.state.step == 2
    assert [item.entry.step for item in rejected] == [4]
    return told


def sock(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(path.name)


@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir, lambda path: path.symlink_to("/dev/zero"), sock])
@pytest.mark.parametrize("name", [MANIFEST, STATE, TENSORS])
def test_what_is_no_regular_file_is_not_waited_for(
    name: str, make: Callable[[Path], object], run: SavedRun, ckpt: Ckpt, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = run.path(4) / name
    path.unlink()
    monkeypatch.chdir(path.parent)  # names of sockets are short
    make(path)
    assert name in seen_as_broken(ckpt, run)


@pytest.mark.parametrize("name", [MANIFEST, STATE])
def test_a_text_larger_than_any_is_not_read(name: str, run: SavedRun, ckpt: Ckpt) -> None:
    with (run.path(4) / name).open("ab") as file:
        file.truncate(64 * LARGEST_TEXT)
    assert "64.0 GiB" in seen_as_broken(ckpt, run) or name == STATE


def test_shards_by_the_hundred_million_are_counted_and_not_listed(run: SavedRun, ckpt: Ckpt) -> None:
    rewrite(run.path(4), lambda told: told["files"][0].update(name="trainer-00000-of-99999999.safetensors"))
    told = seen_as_broken(ckpt, run)
    assert "0 of 99999999 shards" in told and "more are missing" in told and len(told) < 2000


WRONG = {
    **{name: [None, -5, [1], {"a": {"b": 1}}, float("nan")] for name in ("step", "attempt", "time")},
    **{name: [None, "x", 7, [1], {"a": {"b": 1}}] for name in ("identity", "versions", "retention")},
    "settings": [None, "x", [1], 7],
    "release": [None, 7, [1]],
    "format": [None, "x", -1, True],
    "parts": [None, "x", [1], [[1]], ["trainer", "trainer"], {"a": 1}],
    "files": [None, "x", [1], {"a": 1}],
}


@pytest.mark.parametrize(("name", "value"), [(name, value) for name, values in WRONG.items() for value in values])
def test_a_manifest_with_a_right_checksum_over_wrong_types_is_broken(
    name: str, value: object, run: SavedRun, ckpt: Ckpt
) -> None:
    rewrite(run.path(4), lambda told: told.update({name: value}))
    assert MANIFEST in seen_as_broken(ckpt, run)


FILES = [
    *[("name", value) for value in (None, 7, "../x", "/etc/passwd", "", MANIFEST, "x" * 5000)],
    *[("part", value) for value in (None, 7, [1], "other")],
    *[("bytes", value) for value in (None, "x", -5, 0, 1.5)],
    *[("blocks", value) for value in (None, "x", [7], [])],
    *[("slices", value) for value in (None, "x", [7], [{}])],
    ("xxh3", None),
]
SLICES = [
    *[("name", value) for value in (None, 7, [1])],
    *[("dtype", value) for value in (None, "x", [1])],
    *[(name, value) for name in ("global_shape", "offset", "local_shape") for value in (None, "x", [-5, 3], [[1]])],
    *[(name, value) for name in ("begin", "end") for value in (None, "x", -5, 10**30)],
    ("local_shape", [10**30, 10**30]),
    ("offset", [1]),
]


@pytest.mark.parametrize(("name", "value"), FILES)
def test_a_file_that_is_listed_with_wrong_types_makes_it_broken(
    name: str, value: object, run: SavedRun, ckpt: Ckpt
) -> None:
    rewrite(run.path(4), lambda told: told["files"][0].update({name: value}))
    seen_as_broken(ckpt, run)


@pytest.mark.parametrize(("name", "value"), SLICES)
def test_a_slice_of_wrong_types_makes_it_broken(name: str, value: object, run: SavedRun, ckpt: Ckpt) -> None:
    rewrite(run.path(4), lambda told: told["files"][0]["slices"][0].update({name: value}))
    seen_as_broken(ckpt, run)


@pytest.mark.parametrize(
    "change",
    [
        lambda told: told.update(parts=None),
        lambda told: told["parts"].update(trainer=7),
        lambda told: told.update(run=None),
        lambda told: told["run"].update(step="x"),
        lambda told: told["run"].update(step=-1),
        lambda told: told["run"].update(cursor=None),
        lambda told: told["run"]["cursor"].update(position="x"),
        lambda told: told["run"]["cursor"].update(digest=7),
    ],
)
def test_a_state_with_a_right_checksum_over_wrong_types_is_broken(change: Change, run: SavedRun, ckpt: Ckpt) -> None:
    path = run.path(4) / STATE
    state = json.loads(path.read_bytes())
    change(state)
    data = json.dumps(state).encode()
    path.write_bytes(data)

    def follow(told: dict[str, Any]) -> None:
        (entry,) = [entry for entry in told["files"] if entry["name"] == STATE]
        entry.update(bytes=len(data), xxh3=checksum(data))

    rewrite(run.path(4), follow)
    assert STATE in seen_as_broken(ckpt, run)


def rewrite(folder: Path, change: Change) -> None:
    """The manifest, changed, with the checksum that it then has."""
    path = folder / MANIFEST
    told = json.loads(path.read_bytes())
    told.pop("xxh3")
    change(told)
    path.write_text(json.dumps({**told, "xxh3": _checksum(told)}))


@pytest.mark.parametrize("where", ["step-00000004/inside", "step-00000099", "."])
def test_nothing_is_exported_among_checkpoints(where: str, run: SavedRun, ckpt: Ckpt) -> None:
    before = sorted(run.folder.rglob("*"))
    assert ckpt("export", run.folder, "--out", run.folder / "checkpoints" / where) == 2
    assert "choose another folder" in ckpt.err
    assert sorted(run.folder.rglob("*")) == before
