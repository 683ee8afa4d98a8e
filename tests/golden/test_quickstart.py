"""The quick start's first 120 steps against a stored curve: what is learned, not which bits learn it.

Other processors and library versions round otherwise, so evaluations and supervised losses are compared within bounds.
To store a new curve after a wanted change: `TIDEMILL_STORE_GOLDEN=1 pytest tests/golden`, and say why in the commit.
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tidemill.cli.main import main

ROOT = Path(__file__).parents[2]
STORED = Path(__file__).parent / "quickstart.json"


@pytest.fixture(scope="module")
def curve(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """100 supervised and 20 reinforcement steps of the recipe, as it stands, on one thread."""
    base = tmp_path_factory.mktemp("golden")
    prepared = base / "quickstart"
    command = [sys.executable, str(ROOT / "recipes" / "quickstart" / "prepare.py"), "--out", str(prepared)]
    subprocess.run(command, check=True, capture_output=True)
    words = [
        f"model={prepared / 'model'}", f"data.prompts={prepared / 'train.jsonl'}", f"run.dir={base / 'run'}",
        f"warm_up.data={prepared / 'warm_up.jsonl'}", f"eval.data={prepared / 'eval.jsonl'}",
        "steps=120", "run.threads=1", "run.device=cpu",
    ]  # fmt: skip
    assert main(["run", str(ROOT / "recipes" / "quickstart.toml"), *words, "--quiet"]) == 0
    lines = [json.loads(line) for line in (base / "run" / "metrics.jsonl").read_text().splitlines()]
    return {
        "evaluations": {str(x["step"]): x["eval/reward"] for x in lines if x["kind"] == "eval"},
        "losses": {
            str(x["step"]): x["policy/loss"]
            for x in lines
            if x["kind"] == "metrics" and x["step"] < 100 and x["step"] % 20 == 0
        },
        "mismatch": max(x.get("mismatch/logprob_abs_max", 0.0) for x in lines),
    }


@pytest.mark.slow
def test_the_quick_start_learns_as_it_did(curve: dict[str, Any]) -> None:
    if os.environ.get("TIDEMILL_STORE_GOLDEN"):
        STORED.write_text(json.dumps(curve, indent=1) + "\n")
    stored = json.loads(STORED.read_text())
    assert curve["evaluations"].keys() == stored["evaluations"].keys() == {"100", "120"}
    for step, value in stored["evaluations"].items():
        assert abs(curve["evaluations"][step] - value) < 0.12, f"evaluation at step {step}"
    for step, value in stored["losses"].items():
        assert abs(curve["losses"][step] - value) < 0.05 + 0.1 * value, f"loss at step {step}"
    # Twenty updates on rewards alone make greedy answers better, by more than chance on 256 prompts would.
    assert curve["evaluations"]["120"] - curve["evaluations"]["100"] > 0.05
    assert curve["mismatch"] < 1e-4
