"""What people do to a run: each ends with a clear message and its exit code, and nothing is lost (real processes)."""

import json
import os
import shutil
import signal
import time
from pathlib import Path

import pytest
import torch

from tests.crash.small_run import outcome, prepare, recipe, start

LIMIT = 90.0


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("bad input")
    prepare(folder)
    return folder


def ended(words: list[str], log: Path, armed: str = "") -> tuple[int | None, str]:
    """Exit code and everything that `tidemill WORDS` printed."""
    process = start(words, log, armed)
    process.join(LIMIT)
    return process.exitcode, log.read_text()


def durable_steps(run: Path) -> list[str]:
    return sorted(p.name for p in (run / "checkpoints").iterdir() if p.name.startswith("step-") and "." not in p.name)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["missing.toml"], "missing.toml"),
        (["{base}/broken.toml"], "broken.toml"),
        (["{good}", "model={base}/no-tokenizer"], "tokenizer"),
        (["{good}", "data.prompts={base}/empty.jsonl"], "empty.jsonl"),
        (["{good}", "data.max_prompt_tokens=2"], "max_prompt_tokens"),
        (["{good}", "data.prompts={base}/chats.jsonl", "model={base}/no-template"], "chat template"),
        (["{good}", "reward.use={base}/reward.py:missing"], "missing"),
        *([] if torch.cuda.is_available() else [(["{good}", "run.device=cuda"], "sees no GPU")]),
        (["{good}", "run.dir=/proc/no-such-place"], "/proc/no-such-place"),
        (["{good}", "model={base}/nowhere"], "nowhere"),
    ],
)
def test_what_cannot_be_right_is_refused_before_anything_starts(base: Path, words: list[str], message: str) -> None:
    (base / "broken.toml").write_text("steps = = 3\n")
    (base / "empty.jsonl").write_text("\n")
    (base / "chats.jsonl").write_text('{"prompt": [{"role": "user", "content": "12"}], "label": "12"}\n')
    for name, gone in (("no-tokenizer", ["tokenizer.json", "tokenizer_config.json"]), ("no-template", [])):
        shutil.copytree(base / "model", base / name, dirs_exist_ok=True)
        for file in gone:
            (base / name / file).unlink(missing_ok=True)
    (base / "no-template" / "chat_template.jinja").unlink(missing_ok=True)
    config = base / "no-template" / "tokenizer_config.json"
    config.write_text(json.dumps({k: v for k, v in json.loads(config.read_text()).items() if k != "chat_template"}))
    run = base / f"refused {message}".replace("/", "_")
    good = recipe(base, run)
    code, text = ended(["run", *(word.format(base=base, good=good) for word in words)], base / "refused.log")
    assert code == 2, text
    assert text.startswith("tidemill: ") or "\ntidemill: " in text
    assert message in text
    assert "Traceback" not in text
    (base / "refused.log").unlink()
    assert not (run / "checkpoints").exists() or not durable_steps(run)


REWARDS = """
import time

calls = 0

def raises(trajectories):
    raise KeyError("on purpose")

def hangs(trajectories):
    time.sleep(3600)

def nothing(trajectories):
    return [None] * len(trajectories)

def nan(trajectories):
    return [float("nan")] * len(trajectories)

def too_few(trajectories):
    return [1.0]
"""


@pytest.mark.parametrize("name", ["raises", "hangs", "nan", "too_few"])
def test_a_reward_that_always_fails_stops_the_run_and_names_itself(base: Path, name: str) -> None:
    (base / "bad_rewards.py").write_text(REWARDS)
    run = base / f"reward {name}"
    words = ["run", str(recipe(base, run)), f"reward.use={base}/bad_rewards.py:{name}", "reward.failure_budget=0.5"]
    code, text = ended([*words, "reward.timeout=0.5"], base / f"{name}.log")
    assert code == 1, text
    assert name in text
    assert "Traceback" not in text
    # The four supervised steps are not lost: with a reward that works, the run goes on from the checkpoint of step 3.
    assert durable_steps(run) == ["step-00000003"]
    code, text = ended(["run", str(recipe(base, run))], base / f"{name}.log")
    assert code == 0, text
    assert "resuming from step-00000003" in text


def test_a_reward_that_abstains_from_everything_teaches_nothing_and_says_so(base: Path) -> None:
    (base / "bad_rewards.py").write_text(REWARDS)
    run = base / "reward nothing"
    words = ["run", str(recipe(base, run)), f"reward.use={base}/bad_rewards.py:nothing"]
    code, text = ended(words, base / "nothing.log")
    assert code == 0, text
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    steps = [line for line in lines if line["kind"] == "metrics" and line["step"] >= 4]
    assert {line["reward/abstained"] for line in steps} == {1.0}
    assert not [line for line in steps if "reward/mean" in line]
    assert {line["policy/updates_empty"] for line in steps} == {1.0}


def test_a_full_disk_stops_the_run_and_the_older_checkpoint_carries_it_on(base: Path) -> None:
    run, log = base / "full disk", base / "full disk.log"
    words = ["run", str(recipe(base, run)), "checkpoint.mode=sync"]
    # The third write of tensors is within the second checkpoint, whatever the parts of one are.
    code, text = ended(words, log, "checkpoint.manifest=disk-full@2")
    assert code == 1, text
    assert "disk is full" in text.lower() or "no space" in text.lower()
    assert str(run / "checkpoints") in text
    assert durable_steps(run) == ["step-00000003"]
    assert ended(["run", str(recipe(base, run))], log)[0] == 0


def test_a_full_disk_may_be_lived_with(base: Path) -> None:
    run, log = base / "full disk, go on", base / "full disk, go on.log"
    words = ["run", str(recipe(base, run)), "checkpoint.on_failure=continue"]
    code, text = ended(words, log, "checkpoint.manifest=disk-full@2")
    assert code == 0, text
    assert "failed" in text
    assert durable_steps(run)[-1] == "step-00000014"


def waiting(process: object, path: Path, text: str) -> None:
    deadline = time.monotonic() + LIMIT
    while not (path.exists() and text in path.read_text()):
        assert time.monotonic() < deadline
        time.sleep(0.005)


def test_a_second_run_on_the_same_folder_is_refused_and_told_who_holds_it(base: Path) -> None:
    run, log = base / "twice", base / "twice.log"
    first = start(["run", str(recipe(base, run)), "steps=10000"], base / "first.log")
    waiting(first, run / "metrics.jsonl", '"step":5')
    code, text = ended(["run", str(recipe(base, run))], log)
    assert code == 2
    assert str(first.pid) in text
    os.kill(first.pid or 0, signal.SIGKILL)
    first.join(LIMIT)
    assert ended(["run", str(recipe(base, run))], log)[0] == 0


def test_a_second_ctrl_c_ends_at_once_and_leaves_what_was_acknowledged(base: Path) -> None:
    run, log = base / "ctrl-c twice", base / "ctrl-c twice.log"
    # The save that the first Ctrl-C asks for is slow: the second does not wait for it.
    process = start(["run", str(recipe(base, run)), "steps=10000"], log, "checkpoint.manifest=delay:30@3")
    waiting(process, run / "metrics.jsonl", '"step":8')
    os.kill(process.pid or 0, signal.SIGINT)
    waiting(process, log, "SIGINT")
    os.kill(process.pid or 0, signal.SIGINT)
    began = time.monotonic()
    process.join(LIMIT)
    assert process.exitcode == 130
    assert time.monotonic() - began < 10
    assert durable_steps(run)
    assert ended(["run", str(recipe(base, run))], log)[0] == 0


def test_a_finished_run_says_so_goes_on_when_asked_for_more_and_starts_afresh_beside_itself(base: Path) -> None:
    run, log = base / "finished", base / "finished.log"
    words = ["run", str(recipe(base, run))]
    assert ended(words, log)[0] == 0
    before, lines = outcome(run), (run / "metrics.jsonl").read_bytes()
    code, text = ended(words, log)
    assert (code, (run / "metrics.jsonl").read_bytes()) == (0, lines)
    assert "nothing to do" in text
    assert ended([*words, "steps=16"], log)[0] == 0
    assert json.loads((run / "summary.json").read_text())["steps"] == 16
    assert (run / "export" / "step-00000016" / "model.safetensors").exists()
    code, text = ended([*words, "--fresh"], log)
    assert code == 0
    assert (run / "aside-1" / "metrics.jsonl").exists()
    assert outcome(run) == before
