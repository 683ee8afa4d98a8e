"""The same rollouts, learned from by one process, by one rank on Ray, by two and by four: the same training.

Sums come in another order over ranks, so numbers agree to rounding of float32, not to the bit: 1e-6 relative for
gradient norm and log-probs of each step, 1e-6 nats for the loss, and 1e-6 for each tensor of the last weights (norm of
the difference over norm).
"""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.crash.small_run import prepare, recipe, start
from tidemill.checkpoint.stored import read_checkpoint, weights_of

LIMIT = 180.0
STEPS = 8
SPAWNED = "cluster.use=tidemill.testing.spawned_cluster:SpawnedClusterSettings"
ARMS = {
    "one rank on Ray": ["cluster.use=ray", "trainer.ranks=1"],
    "two ranks on Ray": ["cluster.use=ray", "trainer.ranks=2"],
    "two ranks": [SPAWNED, "trainer.ranks=2"],
    "four ranks": [SPAWNED, "trainer.ranks=4"],
    "two replicas of two ranks": [SPAWNED, "trainer.ranks=4", "trainer.replicas=2"],
    "two ranks in many micro-batches": [SPAWNED, "trainer.ranks=2", "trainer.tokens_per_micro_batch=40"],
}
COMPARED = ("policy/loss", "policy/grad_norm", "policy/nll")


def trained(base: Path, name: str, words: list[str]) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Metrics of each step, and the last weights, of a run with the given words."""
    run, log = base / name, base / f"{name}.log"
    small = [f"steps={STEPS}", "eval.every=0", "trainer.optimizer.lr=1e-4", "warm_up.optimizer.lr=1e-4"]
    process = start(["run", str(recipe(base, run)), *small, "residency.park_groups=always", *words], log)
    process.join(LIMIT)
    assert process.exitcode == 0, log.read_text()[-3000:]
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    stored = read_checkpoint(run / "checkpoints" / f"step-{STEPS:08d}", step=STEPS)
    weights = {
        key: np.frombuffer(tensor.data, np.float32).reshape(tensor.shape) for key, tensor in weights_of(stored).items()
    }
    return [row for row in rows if row["kind"] == "metrics"], weights


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("parity")
    prepare(folder)
    return folder


@pytest.fixture(scope="module")
def inline(base: Path) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    trained(base, "played", ["rollout.dump=true"])
    return trained(base, "inline", ["rollout.dump=false", f'rollout.replay="{base / "played" / "rollouts"}"'])


@pytest.mark.slow
@pytest.mark.parametrize("arm", ARMS)
def test_ranks_learn_what_one_process_learns(
    base: Path, inline: tuple[list[dict[str, Any]], dict[str, Any]], arm: str
) -> None:
    rows, weights = trained(
        base, arm, [*ARMS[arm], "rollout.dump=false", f'rollout.replay="{base / "played" / "rollouts"}"']
    )
    assert len(rows) == len(inline[0]) == STEPS
    for row, wanted in zip(rows, inline[0], strict=True):
        for name in COMPARED:
            # Advantages of either sign cancel in the loss: what is left is compared on the scale of what was summed.
            near = pytest.approx(wanted[name], rel=1e-6, abs=1e-6 if name == "policy/loss" else 0.0)
            assert row[name] == near, f"{name} of step {row['step']}"
    assert weights.keys() == inline[1].keys()
    for name, value in inline[1].items():
        difference = np.linalg.norm(weights[name].astype(np.float64) - value) / np.linalg.norm(value)
        assert difference < 1e-6, f"{name} differs by {difference:.1e}"
