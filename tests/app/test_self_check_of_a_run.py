"""The self-check in whole runs, and what `rollout.max_mismatch` stands for (`tidemill.app.build`)."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
from tests.crash.small_run import STEPS, WARM_UP, prepare, recipe

from tidemill.app.build import mismatch_limit
from tidemill.cli.main import main
from tidemill.config.load import load


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("checked")
    prepare(folder)
    return folder


def lines(run: Path, name: str, kind: str) -> list[dict[str, Any]]:
    found = [json.loads(line) for line in (run / f"{name}.jsonl").read_text().splitlines()]
    return [line for line in found if line["kind"] == kind]


def test_each_start_checks_once_and_every_step_is_measured(base: Path) -> None:
    run = base / "twice"
    words = [str(recipe(base, run)), "--quiet", "recorder.use=[]"]
    assert main(["run", *words, "steps=8"]) == 0
    assert main(["run", *words]) == 0
    notices = [line for line in lines(run, "events", "notice") if "self-check" in line["text"]]
    assert [line["step"] for line in notices] == [WARM_UP, 8]
    assert all(line["details"]["mismatch/logprob_abs_max"] < 1e-4 for line in notices)
    timed = [line for line in lines(run, "metrics", "timing") if "time/self_check" in line]
    assert [line["step"] for line in timed] == [WARM_UP, 8]
    measured = [line for line in lines(run, "metrics", "metrics") if "mismatch/logprob_abs_p99" in line]
    assert [line["step"] for line in measured] == list(range(WARM_UP, STEPS))
    assert all(line["mismatch/ratio"] == pytest.approx(1.0, abs=1e-4) for line in measured)
    apart = lines(run, "samples", "apart")
    assert {line["step"] for line in apart} == set(range(WARM_UP, STEPS))
    dumped = [json.loads(x) for x in (run / "rollouts" / f"step-{WARM_UP:08d}.jsonl").read_text().splitlines()]
    by_id = {line["id"]: line for line in dumped}
    for token in (line for line in apart if line["step"] == WARM_UP):
        answer = by_id[token["trajectory"]]
        assert answer["token_ids"][token["position"]] == token["token_id"]
        assert answer["logprobs"][token["position"]] == pytest.approx(token["engine"], abs=1e-6)
        assert answer["trainer_logprobs"][token["position"]] == token["trainer"]


def test_a_run_beyond_the_limit_ends_before_it_learns_anything(base: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = base / "refused"
    words = ["run", str(recipe(base, run)), "--quiet", "recorder.use=[]", "warm_up.steps=0"]
    assert main([*words, "rollout.max_mismatch=1e-12"]) == 1
    assert "more than rollout.max_mismatch = 1e-12" in capsys.readouterr().err
    assert lines(run, "metrics", "metrics") == []
    assert not [path for path in (run / "checkpoints").iterdir() if path.name.startswith("step-")]
    assert main([*words, "rollout.max_mismatch=off"]) == 0
    assert not [line for line in lines(run, "events", "notice") if "self-check" in line["text"]]


@pytest.mark.parametrize(
    ("words", "device", "limit"),
    [
        ([], "cpu", 0.001),
        ([], "cuda", 0.1),
        (["engine.dtype=bfloat16"], "cpu", 0.1),
        (["trainer.dtype=bfloat16"], "cpu", 0.1),
        (["engine.dtype=float32", "trainer.dtype=float32"], "cuda", 0.001),
        (["rollout.max_mismatch=0.2"], "cuda", 0.2),
        (["rollout.max_mismatch=1"], "cpu", 1.0),
        (["rollout.max_mismatch=off"], "cpu", math.inf),
    ],
)
def test_a_limit_is_by_dtype_unless_it_is_given(base: Path, words: list[str], device: str, limit: float) -> None:
    assert mismatch_limit(load([recipe(base, base / "any")], words).config, device) == limit
