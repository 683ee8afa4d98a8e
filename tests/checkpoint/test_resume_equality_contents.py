"""Everything that determines the future is in a checkpoint of a real run, in one process and over ranks."""

import json
from pathlib import Path
from typing import Any

import pytest
from tests.checkpoint.real_runs import CHANCE, RANKS, checkpoint_of, started
from tests.crash.small_run import prepare, recipe

from tidemill.app.identity import model_identity, tokenizer_identity
from tidemill.checkpoint.manifest import Manifest, library_versions
from tidemill.data.fingerprint import fingerprint

MOODY = "tests.checkpoint.real_runs:MoodySettings"
STEPS = 7  # warm-up ends at 4; saved are 3, 6 and 7


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("contents")
    prepare(folder)
    return folder


@pytest.fixture(scope="module", params=["inline", "ranks"])
def run(base: Path, request: pytest.FixtureRequest) -> Path:
    folder = base / str(request.param)
    words = [f"steps={STEPS}", "eval.every=0", "checkpoint.export=false", "checkpoint.keep_last=9", *CHANCE]
    assert started(base, folder, *words, *(RANKS if request.param == "ranks" else ())) == 0
    return folder


def manifest_of(run: Path, step: int) -> Manifest:
    return Manifest.read(checkpoint_of(run, step) / "manifest.json")


def state_of(run: Path, step: int) -> dict[str, Any]:
    state: dict[str, Any] = json.loads((checkpoint_of(run, step) / "state.json").read_text())
    return state


def test_weights_buffers_and_both_moments_of_every_parameter_are_in_it(run: Path) -> None:
    names = {piece.name for entry in manifest_of(run, 6).files for piece in entry.slices}
    parameters = {name.removeprefix("model/") for name in names if name.startswith("model/")}
    assert len(parameters) > 10
    for kind in ("exp_avg", "exp_avg_sq"):
        assert {name for name in names if name.startswith(f"optimizer/{kind}/")} == {
            f"optimizer/{kind}/{name}" for name in parameters
        }
    assert any(name.startswith("buffer/") for name in names)
    assert all(name.split("/")[0] in ("model", "optimizer", "buffer") for name in names)


def test_phase_updates_optimizer_steps_and_the_end_of_the_schedule_are_in_it(run: Path) -> None:
    warm, later = (state_of(run, step)["parts"]["trainer"] for step in (3, 6))
    assert (warm["phase"], warm["updates"], warm["optimizer_steps"]) == ("warm_up", 3, 3)
    assert (later["phase"], later["updates"], later["total_steps"]) == ("rl", 2, STEPS - 4)
    assert later["optimizer_steps"] <= 2


def test_step_attempt_seed_and_both_cursors_with_their_digests_are_in_it(run: Path) -> None:
    state = state_of(run, 6)["run"]
    assert (state["step"], state["attempt"]) == (6, 1)
    assert state["cursor"].keys() == {"epoch", "position", "digest"}
    assert (state["cursor"]["epoch"], state["cursor"]["position"]) == (0, 2 * 3)
    assert len(state["cursor"]["digest"]) == 32
    # 4 steps of 8 rows of 13.
    assert (state["warm_up_cursor"]["epoch"], state["warm_up_cursor"]["position"]) == (2, 6)


def test_the_generators_of_the_driver_and_of_every_rank_are_in_it_and_have_moved(run: Path) -> None:
    before, after = (state_of(run, step)["parts"] for step in (3, 6))
    held = [(before["random"], after["random"])]
    if run.name == "ranks":
        held += zip(before["trainer"]["rank_random"], after["trainer"]["rank_random"], strict=True)
    assert len(held) == (3 if run.name == "ranks" else 1)
    for one, other in held:
        assert all(one[name] != other[name] for name in ("python", "numpy", "torch"))


def test_hashes_of_model_tokenizer_and_data_library_versions_and_settings_with_their_origins_are_in_it(
    base: Path, run: Path
) -> None:
    manifest = manifest_of(run, 6)
    assert manifest.identity["model"] == model_identity(base / "model")
    assert manifest.identity["tokenizer"] == tokenizer_identity(base / "model")
    assert manifest.identity["data"] == fingerprint(base / "rows.jsonl")
    assert manifest.identity["warm_up"] == f"4 steps of {fingerprint(base / 'rows.jsonl')}"
    assert (manifest.identity["algorithm"], manifest.identity["seed"]) == (MOODY, "0")
    assert manifest.versions == library_versions()
    assert manifest.settings["settings"]["steps"] == STEPS
    assert manifest.settings["origins"]["steps"] == "command line"
    assert str(recipe(base, run)) in manifest.settings["origins"]["run.dir"]
