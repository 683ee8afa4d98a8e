"""The quick start with vLLM: the trainer sleeps at every rollout, a checkpoint is written, a stopped run goes on."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from tests.engines.vllm.test_engine import DEVICE

ROOT = Path(__file__).parents[3]
STORED = json.loads((ROOT / "tests" / "golden" / "quickstart.json").read_text())

pytestmark = [pytest.mark.vllm, pytest.mark.slow]


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("vllm") / "quickstart"
    command = [sys.executable, str(ROOT / "recipes" / "quickstart" / "prepare.py"), "--out", str(folder)]
    subprocess.run(command, check=True, capture_output=True)
    return folder


def told(prepared: Path, run: Path, *words: str) -> list[str]:
    paths = {
        "model": "model",
        "data.prompts": "train.jsonl",
        "warm_up.data": "warm_up.jsonl",
        "eval.data": "eval.jsonl",
    }
    return [
        sys.executable, "-m", "tidemill", "run", str(ROOT / "recipes" / "quickstart.toml"),
        *(f"{name}={prepared / path}" for name, path in paths.items()),
        f"run.dir={run}", "steps=120", "run.threads=1",
        f"run.device={DEVICE}", "engine.use=vllm", "engine.graphs=false", "--quiet", *words,
    ]  # fmt: skip


def lines(run: Path) -> list[dict]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def run(prepared: Path) -> Path:
    folder = prepared.parent / "run"
    done = subprocess.run(told(prepared, folder), capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr[-3000:]
    return folder


def test_the_quick_start_learns_with_vllm_what_it_learns_without(run: Path) -> None:
    told = lines(run)
    evaluations = {str(line["step"]): line["eval/reward"] for line in told if line["kind"] == "eval"}
    assert evaluations.keys() == STORED["evaluations"].keys()
    for step, value in STORED["evaluations"].items():
        assert abs(evaluations[step] - value) < 0.12, f"evaluation at step {step}"
    assert evaluations["120"] - evaluations["100"] > 0.05
    means = [line["mismatch/logprob_abs_mean"] for line in told if "mismatch/logprob_abs_mean" in line]
    assert len(means) == 20 and max(means) < (0.001 if DEVICE == "cpu" else 0.05)


def test_the_engine_leaves_at_every_step_and_so_does_the_trainer(run: Path) -> None:
    told = [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]
    moves = [event["what"] for event in told if event["kind"] == "transition"]
    assert moves.count("engine.sleep") >= 20 and moves.count("trainer.sleep") >= 20
    held = [event["device"] for event in told if event["kind"] == "memory" and event["what"] == "engine.sleep"]
    assert {device["engine"] for device in held} == {0}


def test_a_run_that_is_stopped_goes_on_from_its_checkpoint(prepared: Path, run: Path) -> None:
    stopped = prepared.parent / "stopped"
    words = told(prepared, stopped, "checkpoint.every=5")
    process = subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 200
    while not any(
        line.get("step", 0) >= 107 for line in (lines(stopped) if (stopped / "metrics.jsonl").exists() else [])
    ):
        assert process.poll() is None and time.monotonic() < deadline, process.stderr
        time.sleep(0.2)
    os.kill(process.pid, signal.SIGTERM)
    assert process.wait(timeout=60) != 0
    done = subprocess.run(words, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr[-3000:]
    last = max(line["step"] for line in lines(stopped) if line["kind"] == "metrics")
    assert last == max(line["step"] for line in lines(run) if line["kind"] == "metrics")
    ends = {folder: [line for line in lines(folder) if line["kind"] == "eval"][-1] for folder in (run, stopped)}
    assert abs(ends[run]["eval/reward"] - ends[stopped]["eval/reward"]) < 0.12


def test_the_engine_learns_the_same_in_a_process_of_its_own(prepared: Path, run: Path) -> None:
    apart = prepared.parent / "apart"
    words = told(prepared, apart, "cluster.use=ray")
    done = subprocess.run(words, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr[-3000:]
    ends = {folder: [line for line in lines(folder) if line["kind"] == "eval"][-1] for folder in (run, apart)}
    assert abs(ends[run]["eval/reward"] - ends[apart]["eval/reward"]) < 0.12
