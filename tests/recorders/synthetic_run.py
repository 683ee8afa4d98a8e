"""A run folder as a long run leaves it, written by the sinks themselves, with made-up numbers and clocks.

`python tests/recorders/synthetic_run.py FOLDER` writes one and its page, to look at.
"""

import json
import math
import random
import sys
from pathlib import Path

from tidemill.contracts.events import (
    CheckpointEvent,
    Evaluated,
    Memory,
    Metrics,
    Notice,
    PhaseDone,
    RolloutDone,
)
from tidemill.contracts.sample import Group, Prompt, Score, StopReason, Trajectory
from tidemill.contracts.state import PolicyVersion
from tidemill.recorders.jsonl import JsonlSink

GIB = 1 << 30
TRAINER, ENGINE, KV = int(19.2 * GIB), int(3.2 * GIB), int(15 * GIB)
BUDGET = 26 * GIB


def group(step: int, row: int, *, good: float = 0.5, dice: random.Random, text: str = "") -> Group:
    """Four answers to a made-up question."""
    digits = "".join(dice.choice("0123456789") for _ in range(8))
    prompt = Prompt(
        id=str(row), key=f"{step}:{row}", token_ids=(1, 2), text=text or f"sort {digits}", label="".join(sorted(digits))
    )
    members = []
    for sample in range(4):
        right = dice.random() < good
        answer = "".join(sorted(digits)) if right else "".join(sorted(digits)[::-1])
        members.append(
            Trajectory(
                prompt=prompt,
                sample=sample,
                token_ids=(3,) * 9,
                logprobs=(-0.5,) * 9,
                loss_mask=(True,) * 9,
                version=PolicyVersion(1, step),
                stop_reason=StopReason.EOS,
                text=text or answer,
                score=Score(value=float(right)),
            )
        )
    return Group(prompt=prompt, trajectories=tuple(members))


class Story:
    """Writes one step after the other, with a clock of its own."""

    def __init__(self, run: Path, *, warm_up: int, seed: int = 0) -> None:
        self.now = 1_796_000_000.0
        self.sink = JsonlSink(run=run, clock=lambda: self.now)
        self.dice = random.Random(seed)
        self.warm_up = warm_up
        self.sink.resume(0, {})
        self.device = {"trainer": TRAINER, "engine": 0}
        self.host = {"trainer": 0, "engine": 0}
        self.sink.write(
            0, Notice(text="Qwen3, 1.7B parameters, on cuda:0; the trainer takes 19.2 GiB, the engine 18.2 GiB")
        )

    def phase(self, step: int, name: str, seconds: float, owner: str = "") -> float:
        seconds *= self.dice.uniform(0.92, 1.1)
        self.sink.write(step, PhaseDone(name=name, start=self.now, seconds=seconds, owner=owner))
        self.now += seconds
        return seconds

    def memory(self, step: int, what: str, **device: int) -> None:
        self.device |= device
        self.host["trainer"] = 0 if self.device["trainer"] else TRAINER
        self.sink.write(
            step, Memory(time=self.now, what=what, device=dict(self.device), host=dict(self.host), budget=BUDGET)
        )

    def rollout(self, step: int, skill: float, *, evaluate: bool) -> None:
        self.phase(step, "sleep", 0.42, "trainer")
        self.memory(step, "sleep trainer", trainer=0)
        self.phase(step, "wake_up", 0.09, "engine")
        self.memory(step, "wake_up engine", engine=ENGINE + KV)
        groups = [group(step, row, good=skill, dice=self.dice) for row in range(4)]
        if evaluate:
            self.phase(step, "evaluate", 0.8, "engine")
            self.sink.write(
                step, Evaluated(values={"eval/reward": skill + 0.05, "eval/failed": 0.0, "eval/tokens_mean": 9.0})
            )
            self.sink.write(step, RolloutDone(kind="eval", groups=groups[:2]))
        self.phase(step, "generate", 1.3, "engine")
        self.phase(step, "reward", 0.12)
        self.sink.write(step, RolloutDone(kind="train", groups=groups))
        self.phase(step, "sleep", 0.05, "engine")
        self.memory(step, "sleep engine", engine=0)
        self.phase(step, "wake_up", 0.52, "trainer")
        self.memory(step, "wake_up trainer", trainer=TRAINER)

    def step(self, step: int, *, evaluate: bool = False, save: bool = False) -> None:
        begin = self.now
        learning = step >= self.warm_up
        progress = 1 - math.exp(-(step - self.warm_up) / 110)
        skill = 0.52 + 0.4 * progress
        if learning:
            self.rollout(step, skill, evaluate=evaluate)
        self.now += 0.02
        self.phase(step, "train", 1.1 if learning else 0.4, "trainer")
        self.sink.write(step, Metrics(values=self.numbers(step, skill, learning)))
        if save:
            saved = step + 1
            path = f"checkpoints/step-{saved:08d}"
            self.phase(step, "save_stall", 0.006, "trainer")
            self.sink.write(
                step,
                CheckpointEvent(time=self.now, status="staged", step=saved, path=path, bytes=TRAINER, seconds=0.006),
            )
            self.sink.write(step, PhaseDone(name="save_durable", start=self.now, seconds=2.1))
            self.sink.write(
                step + 1,
                CheckpointEvent(
                    time=self.now + 2.1, status="durable", step=saved, path=path, bytes=TRAINER, seconds=2.1
                ),
            )
        if learning:
            start = self.now
            self.phase(step, "wake_up", 0.02, "engine")
            self.memory(step, "wake_up engine (weights)", engine=ENGINE)
            self.now += 0.06
            self.sink.write(step, PhaseDone(name="update_weights", start=start, seconds=self.now - start))
        self.now += 0.02
        seconds = self.now - begin
        self.sink.write(step, PhaseDone(name="step", start=begin, seconds=seconds))
        self.sink.write(step, Metrics(values={"time/step": seconds, "time/other": 0.04}))

    def numbers(self, step: int, skill: float, learning: bool) -> dict[str, float]:
        noise = self.dice.gauss
        if not learning:
            return {
                "policy/loss": 2.2 * math.exp(-step / 30) + 0.9 + noise(0, 0.03),
                "policy/grad_norm": 1 + abs(noise(0, 0.2)),
                "policy/lr": 2e-3 * min(1, (step + 1) / 50),
                "batch/tokens": 2304,
            }
        return {
            "reward/mean": min(1.0, max(0.0, skill + noise(0, 0.08))),
            "policy/loss": noise(0, 0.02),
            "policy/grad_norm": 0.8 + abs(noise(0, 0.2)),
            "policy/kl": abs(noise(0, 3e-4)),
            "policy/lr": 5e-5,
            "policy/clip_fraction": abs(noise(0, 0.01)),
            "mismatch/logprob_abs_mean": 0.008 + abs(noise(0, 0.002)),
            "mismatch/logprob_abs_p99": 0.05 + abs(noise(0, 0.01)),
            "rollout/tokens_mean": 9 + noise(0, 0.3),
            "batch/tokens": 1152,
        }


def write_run(run: Path, *, steps: int = 400, warm_up: int = 100, finished: bool = True) -> None:
    """The whole folder but for the checkpoints themselves."""
    story = Story(run, warm_up=warm_up)
    for step in range(steps):
        if step == steps * 3 // 4:
            story.now += 9000
            story.sink.write(step, Notice(text="going on from checkpoint 300; 301 had 1 of 2 files", level="warning"))
        story.step(step, evaluate=(step - warm_up) % 50 == 0, save=(step + 1) % 50 == 0)
    story.sink.write(steps, Evaluated(values={"eval/reward": 0.957, "eval/failed": 0.0, "eval/tokens_mean": 9.0}))
    story.sink.close()
    settings = {
        "model": {"value": "models/qwen3-1.7b", "origin": "run.toml"},
        "steps": {"value": steps, "origin": "command line"},
        "warm_up.steps": {"value": warm_up, "origin": "run.toml"},
        "run.dir": {"value": "runs/<quick & dirty>", "origin": "command line"},
        "trainer.optimizer.lr": {"value": 5e-5, "origin": "run.toml"},
        "residency.budget": {"value": "26 GiB", "origin": "run.toml"},
        **{
            f"engine.sampling.{name}": {"value": None, "origin": "default"}
            for name in ("seed", "stop", "top_k", "top_p")
        },
    }
    manifest = {
        "settings": settings,
        "versions": {"tidemill": "0.1.0", "torch": "2.13.0", "python": "3.11.9"},
        "attempt": 2,
        "started": 1_796_000_000.0,
        "command": ["tidemill", "run", "run.toml", f"steps={steps}"],
        "device": "cuda:0, H200",
    }
    (run / "manifest.json").write_text(json.dumps(manifest))
    if finished:
        summary = {
            "steps": steps,
            "seconds": 1210.4,
            "eval_first": 0.56,
            "eval_last": 0.957,
            "reward_first": 0.53,
            "reward_last": 0.9,
            "checkpoints": 8,
            "sleeps": 300,
            "wakes": 300,
            "save_stall_seconds": 0.05,
            "peak_host_bytes": 23 * GIB,
            "export": "export",
            "finished": True,
        }
        (run / "summary.json").write_text(json.dumps(summary))


if __name__ == "__main__":
    from tidemill.recorders.report import write_report

    folder = Path(sys.argv[1])
    write_run(folder, steps=int(sys.argv[2]) if len(sys.argv) > 2 else 400)
    sys.stdout.write(f"{write_report(folder)}\n")
