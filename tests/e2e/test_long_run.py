"""A run of hundreds of steps takes no more of the machine at its end than at its beginning, and leaves nothing."""

import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from tests.crash.small_run import prepare, recipe

LIMIT = 120.0
STEPS, FROM = 300, 100


@dataclass(frozen=True)
class Held:
    """What a run holds at a step. Children are the reward's; threads come and go with each save."""

    step: int
    resident: int
    files: int
    threads: int
    children: int


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("long run")
    prepare(folder)
    return folder


def tidemill(*words: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-m", "tidemill", *words], stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL
    )


def watched(process: subprocess.Popen[bytes], metrics: Path) -> list[Held]:
    """Every 20 steps, what the process holds."""
    deadline = time.monotonic() + LIMIT
    tree, held, steps, read = psutil.Process(process.pid), list[Held](), 0, 0
    while process.poll() is None:
        assert time.monotonic() < deadline
        time.sleep(0.02)
        if metrics.exists():
            with metrics.open("rb") as file:
                file.seek(read)
                new = file.read()
            read += len(new)
            steps += new.count(b'{"kind":"timing"')
        if steps >= 20 * (len(held) + 1):
            try:
                held.append(
                    Held(
                        step=steps,
                        resident=tree.memory_info().rss,
                        files=tree.num_fds(),
                        threads=tree.num_threads(),
                        children=len(tree.children(recursive=True)),
                    )
                )
            except psutil.NoSuchProcess:
                break
    return held


def test_memory_files_threads_and_processes_are_flat_over_hundreds_of_steps_and_the_run_ends_when_it_is_done(
    base: Path,
) -> None:
    run = base / "run"
    words = [f"steps={STEPS}", "checkpoint.every=25", "eval.every=0", "rollout.prompts=2", "rollout.samples=2"]
    process = tidemill("run", str(recipe(base, run)), *words, 'recorder.use=["rich","tensorboard"]')
    held = [one for one in watched(process, run / "metrics.jsonl") if one.step >= FROM]
    assert process.wait(LIMIT) == 0
    assert time.time() - (run / "summary.json").stat().st_mtime < 15
    assert len(held) > 5
    early, late = held[0], held[-1]
    assert late.step - early.step > 150
    assert late.resident - early.resident < 5 * 10**6
    assert max(one.files for one in held) - min(one.files for one in held) <= 4
    assert max(one.threads for one in held) - min(one.threads for one in held) <= 2
    assert {one.children for one in held} == {1}


def test_a_run_killed_with_its_reward_at_work_leaves_no_process_behind(base: Path) -> None:
    run = base / "orphans"
    (base / "slow.py").write_text("import time\n\n\ndef score(answers):\n    time.sleep(600)\n    return [0.0]\n")
    process = tidemill("run", str(recipe(base, run)), f"reward.use={base}/slow.py:score", "reward.timeout=600")
    deadline = time.monotonic() + LIMIT
    while not (run / "checkpoints" / "step-00000003" / "manifest.json").exists():
        assert time.monotonic() < deadline
        time.sleep(0.01)
    time.sleep(0.3)  # into the first rollout's reward
    children = psutil.Process(process.pid).children(recursive=True)
    assert children
    os.kill(process.pid, signal.SIGKILL)
    process.wait(LIMIT)
    _, left = psutil.wait_procs(children, timeout=10)
    assert not left
