"""Two GPUs, two ranks and two engine replicas on Ray: what one GPU learns, and the quick start whole."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.crash.small_run import prepare, recipe

ROOT = Path(__file__).parents[2]
pytestmark = [pytest.mark.gpu2, pytest.mark.slow, pytest.mark.timeout(560)]
STEPS = 10


def tidemill(*words: str) -> str:
    done = subprocess.run([sys.executable, "-m", "tidemill", *words], capture_output=True, text=True, timeout=540)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return done.stdout


def metrics(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module", autouse=True)
def two_gpus() -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two CUDA devices")


def test_two_ranks_learn_what_one_gpu_learns_in_bfloat16(tmp_path: Path) -> None:
    """Loss within 2e-3 nats, log-probs (mean) within 1e-3 nats, gradient norm within 2 %: rounding of bfloat16."""
    prepare(tmp_path)
    small = [f"steps={STEPS}", "eval.every=0", "trainer.optimizer.lr=1e-4", "warm_up.optimizer.lr=1e-4"]
    tidemill("run", str(recipe(tmp_path, tmp_path / "played")), *small, "run.device=cuda", "rollout.dump=true")
    replay = [*small, "run.device=cuda", "rollout.dump=false", f'rollout.replay="{tmp_path / "played" / "rollouts"}"']
    tidemill("run", str(recipe(tmp_path, tmp_path / "one")), *replay)
    tidemill("run", str(recipe(tmp_path, tmp_path / "two")), *replay, "cluster.use=ray", "trainer.ranks=2")
    rows = [[row for row in metrics(tmp_path / name) if row["kind"] == "metrics"] for name in ("one", "two")]
    worst = {"policy/loss": 0.0, "policy/nll": 0.0, "policy/grad_norm": 0.0}
    for one, two in zip(*rows, strict=True):
        for name in worst:
            scale = (one[name] or 1.0) if name == "policy/grad_norm" else 1.0
            worst[name] = max(worst[name], abs(one[name] - two[name]) / scale)
    sys.stdout.write(f"\nlargest differences over {STEPS} steps: {worst}")
    assert worst["policy/loss"] < 2e-3
    assert worst["policy/nll"] < 1e-3
    assert worst["policy/grad_norm"] < 0.02


def test_the_quick_start_learns_on_two_gpus_as_on_one(tmp_path: Path) -> None:
    prepared = tmp_path / "quickstart"
    command = [sys.executable, str(ROOT / "recipes" / "quickstart" / "prepare.py"), "--out", str(prepared)]
    subprocess.run(command, check=True, capture_output=True)
    words = [
        f"model={prepared / 'model'}", f"data.prompts={prepared / 'train.jsonl'}", f"run.dir={tmp_path / 'run'}",
        f"warm_up.data={prepared / 'warm_up.jsonl'}", f"eval.data={prepared / 'eval.jsonl'}",
        "run.device=cuda", "cluster.use=ray", "trainer.ranks=2", "residency.offload=never",
    ]  # fmt: skip
    sys.stdout.write(tidemill("run", str(ROOT / "recipes" / "quickstart.toml"), *words, "--quiet"))
    rows = metrics(tmp_path / "run")
    evaluations = {row["step"]: row["eval/reward"] for row in rows if row["kind"] == "eval"}
    sys.stdout.write(f"\nevaluations: {evaluations}")
    assert evaluations[400] > 0.9
    mismatch = max(row.get("mismatch/logprob_abs_mean", 0.0) for row in rows if row["kind"] == "metrics")
    assert mismatch < 0.02
