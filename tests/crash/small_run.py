"""A real run, small enough to be killed thirty times: a tiny model, real data, real files, processes of their own.

Processes come from a fork server that has imported everything once, so that a start costs tenths of a second.
"""

import contextlib
import json
import multiprocessing
import os
import random
import sys
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing import forkserver, util
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

from tidemill import faults
from tidemill.testing.spawned import _PRELOAD
from tidemill.testing.tiny import make_tiny_model, sort_digits_problem

STEPS, WARM_UP = 14, 4

RECIPE = """
steps = {steps}
model = "{base}/model"
[run]
dir = "{run}"
device = "cpu"
threads = 1
[warm_up]
steps = {warm_up}
data = "{base}/rows.jsonl"
batch = 8
optimizer = {{ lr = 1e-3 }}
[data]
prompts = "{base}/rows.jsonl"
[reward]
use = "{base}/reward.py:score"
failure_budget = 1.0
[rollout]
prompts = 3
samples = 4
dump = true
sampling = {{ max_new_tokens = 6 }}
[trainer.optimizer]
lr = 1e-3
[residency]
offload = "always"
[checkpoint]
every = 3
keep_last = 2
trial = false
[eval]
every = 4
data = "{base}/eval.jsonl"
[recorder]
use = ["rich"]
"""

REWARD = '''
def score(trajectories):
    """Share of the digits that stand where they should."""
    return [sum(a == b for a, b in zip(str(t), t.label)) / len(t.label) for t in trajectories]
'''


def prepare(base: Path) -> None:
    """Model, rows, reward; no whole number of steps an epoch."""
    make_tiny_model(base / "model", hidden=32, layers=2, heads=2, kv_heads=2, seed=3)
    rng = random.Random(5)
    for name, count in (("rows", 13), ("eval", 5)):
        rows = [dict(zip(("prompt", "label"), sort_digits_problem(rng), strict=True)) for _ in range(count)]
        (base / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (base / "reward.py").write_text(REWARD)


def recipe(base: Path, run: Path) -> Path:
    """The settings file of a run in the folder `run`."""
    path = base / f"{run.name}.toml"
    path.write_text(RECIPE.format(base=base, run=run, steps=STEPS, warm_up=WARM_UP))
    return path


def nothing() -> None:
    """Nothing to do."""


def _command(words: list[str], log: str, armed: str, inside: Callable[[], object]) -> None:
    os.setsid()  # as from a shell of its own: a signal to the test runner is not for the run
    descriptor = os.open(log, os.O_CREAT | os.O_WRONLY | os.O_APPEND) if log else _unread()
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    inside()
    _fork_server_of_its_own()
    faults.arm(armed)
    from tidemill.cli.main import main

    code = main(words)
    sys.stdout.flush()
    os._exit(code)


def _fork_server_of_its_own() -> None:
    """What the run forks its workers from is forked here, with all imports made: started, it takes seconds for them."""
    started = util.spawnv_passfds

    def forked(path: bytes, args: list[Any], passed: list[int]) -> int:
        if "forkserver" not in str(args[-1]):
            return started(path, args, passed)
        if pid := os.fork():
            return pid
        for entry in list(Path("/proc/self/fd").iterdir()):
            if (number := int(entry.name)) > 2 and number not in passed:
                with contextlib.suppress(OSError):
                    os.close(number)
        try:
            exec(args[-1], {})  # noqa: S102 - multiprocessing's own words
        finally:
            os._exit(0)

    util.spawnv_passfds = forked
    try:
        forkserver.set_forkserver_preload(["tidemill.testing.spawned_cluster"])
        forkserver.ensure_running()
    finally:
        util.spawnv_passfds = started


def _unread() -> int:
    """A pipe whose reader is gone, as after `tidemill run ... | head`."""
    reading, writing = os.pipe()
    os.close(reading)
    return writing


def start(
    words: list[str], log: Path | None, armed: str = "", inside: Callable[[], object] = nothing
) -> ForkServerProcess:
    """`tidemill WORDS` in a process of its own, with faults armed; without a log nobody reads what it says.

    `inside` is called there first, and can be pickled: what it changes, the run's workers inherit.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tidemill.app.run", "tidemill.cli.main", *_PRELOAD])
    process = context.Process(target=_command, args=(words, str(log or ""), armed, inside))
    process.start()
    return process


@dataclass(frozen=True)
class Outcome:
    """Everything of a finished run that must not depend on kills."""

    state: dict[str, Any]
    checksums: dict[str, str]
    metrics: list[dict[str, Any]]
    rollouts: dict[str, list[dict[str, Any]]]
    export: bytes
    samples: list[dict[str, Any]]


def outcome(run: Path) -> Outcome:
    """Read a finished run back."""
    last = run / "checkpoints" / f"step-{STEPS:08d}"
    state = json.loads((last / "state.json").read_text())
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return Outcome(
        state=without_attempt(state),
        checksums=checksums(run),
        metrics=[line for line in lines if line["kind"] in ("metrics", "eval")],
        rollouts={p.name: [without_version(json.loads(x)) for x in p.read_text().splitlines()]
                  for p in sorted((run / "rollouts").iterdir())},
        export=(run / "export" / f"step-{STEPS:08d}" / "model.safetensors").read_bytes(),
        samples=[json.loads(line) for line in (run / "samples.jsonl").read_text().splitlines()],
    )  # fmt: skip


def without_attempt(value: Any) -> Any:
    """The value without what says which start wrote it."""
    if isinstance(value, dict):
        return {key: without_attempt(item) for key, item in value.items() if key not in ("attempt", "sinks")}
    return value


def without_version(line: dict[str, Any]) -> dict[str, Any]:
    """A dumped answer; the step of its version stays, the attempt goes."""
    return without_attempt(line)  # type: ignore[no-any-return]


def checksums(run: Path) -> dict[str, str]:
    """Checksum of every tensor of a run's last checkpoint, by name: weights, moments, buffers."""
    from tests.checkpoint.pieces import sums_of_pieces  # not where a run is forked from

    found = sums_of_pieces(run / "checkpoints" / f"step-{STEPS:08d}")
    assert any(name.startswith("optimizer/exp_avg_sq/") for name in found)
    return found
