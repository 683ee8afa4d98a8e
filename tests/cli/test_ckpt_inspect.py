"""`tidemill ckpt inspect` (tidemill.cli.ckpt_inspect, tidemill.checkpoint.description)."""

import json
import math

import numpy as np
import pytest
from tests.cli.conftest import Ckpt, SavedRun

ARRAYS = {
    "model/w": np.array([[1.0, -2.0], [math.nan, 4.0], [0.0, 0.0]], dtype=np.float32),
    "optimizer/exp_avg/w": np.zeros((3, 2), dtype=np.float32),
    "model/empty": np.zeros((0, 4), dtype=np.float32),
}


@pytest.fixture
def run(saved: SavedRun) -> SavedRun:
    for step in (2, 4):
        saved.save(step, ARRAYS, ranks=2, attempt=3)
    return saved


def test_it_shows_parts_files_settings_with_origins_identity_and_versions(run: SavedRun, ckpt: Ckpt) -> None:
    assert ckpt("inspect", run.folder) == 0
    assert ckpt.out.startswith("step 4 of attempt 3, ")
    words = [line.split() for line in ckpt.out.splitlines()]
    assert ["name", "ranks", "replicas", "files", "tensors", "slices", "bytes"] in words
    assert ["trainer", "2", "1", "2", "3", "6"] in [line[:6] for line in words]
    assert ["checkpoint.every", "2", "run.toml"] in words
    assert ["seed", "0"] in words and any(line[:1] == ["torch"] for line in words)
    assert "cursor: epoch 0, row 4" in ckpt.out
    assert "tensors:" not in ckpt.out.splitlines()


def test_its_json_has_the_same_and_the_tensors_with_slices(run: SavedRun, ckpt: Ckpt) -> None:
    assert ckpt("inspect", run.folder, "--step", 2, "--tensors", "--json") == 0
    told = ckpt.told
    assert (told["step"], told["attempt"], told["identity"]) == (2, 3, {"model": "abc", "seed": "0"})
    assert told["settings"]["checkpoint.every"] == {"value": 2, "origin": "run.toml"}
    assert told["settings"]["model"] == {"value": str(run.base), "origin": "not known"}
    assert told["problems"] == []
    by_name = {tensor["name"]: tensor for tensor in told["tensors"]}
    assert set(by_name) == set(ARRAYS)
    assert by_name["model/w"] == {
        "part": "trainer", "name": "model/w", "dtype": "F32", "shape": [3, 2], "bytes": 24,
        "slices": [
            {"file": "trainer-00000-of-00002.safetensors", "offset": [0, 0], "shape": [2, 2]},
            {"file": "trainer-00001-of-00002.safetensors", "offset": [2, 0], "shape": [1, 2]},
        ],
    }  # fmt: skip


def test_statistics_are_of_the_finite_elements(run: SavedRun, ckpt: Ckpt) -> None:
    assert ckpt("inspect", run.path(4), "--statistics", "--json") == 0
    by_name = {tensor["name"]: tensor for tensor in ckpt.told["tensors"]}
    told = {name: by_name["model/w"][name] for name in ("min", "max", "mean", "rms", "nonfinite")}
    assert told == {"min": -2.0, "max": 4.0, "mean": 0.6, "rms": pytest.approx(math.sqrt(21 / 5)), "nonfinite": 1}
    assert by_name["model/empty"]["mean"] is None
    assert ckpt("inspect", run.path(4), "--statistics") == 0
    head, *rows = [line.split() for line in ckpt.out.split("tensors:\n")[1].splitlines()]
    assert head == ["part", "tensor", "dtype", "shape", "bytes", "slices", "min", "max", "mean", "rms", "nonfinite"]
    assert rows[1][:1] == ["trainer"] and rows[1][-5:-1] == ["-2", "4", "0.6", "2.04939"]


def test_what_is_missing_or_cut_short_is_shown_and_fails(run: SavedRun, ckpt: Ckpt) -> None:
    (run.path(4) / "trainer-00000-of-00002.safetensors").unlink()
    with (run.path(4) / "trainer-00001-of-00002.safetensors").open("ab") as file:
        file.write(b"x")
    (run.path(4) / "state.json").write_text("[]")
    assert ckpt("inspect", run.folder, "--json") == 1
    missing, longer, state = ckpt.told["problems"]
    assert missing == "trainer-00000-of-00002.safetensors is missing"
    assert longer.startswith("trainer-00001-of-00002.safetensors has ") and state.startswith("state.json has 2 of ")
    assert ckpt("inspect", run.folder) == 1
    assert f"  problem: {missing}" in ckpt.out.splitlines()
    run.damage(2)
    assert ckpt("inspect", run.path(2)) == 0
    assert ckpt("inspect", run.path(2), "--statistics") == 1
    assert "cannot inspect" in ckpt.err


def test_without_a_manifest_there_is_nothing_to_show(run: SavedRun, ckpt: Ckpt) -> None:
    (run.path(4) / "manifest.json").unlink()
    assert ckpt("inspect", run.folder, "--step", 4) == 1
    assert "manifest.json is missing" in ckpt.err
    assert ckpt("inspect", run.folder, "--json") == 0
    assert ckpt.told["step"] == 2
    manifest = run.path(2) / "manifest.json"
    manifest.write_text(json.dumps({**json.loads(manifest.read_text()), "format": 99}))
    assert ckpt("inspect", run.path(2)) == 1
    assert "it has format 99" in ckpt.err
