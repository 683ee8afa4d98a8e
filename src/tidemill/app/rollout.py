"""Generate and score answers with a model as it is: no trainer, no checkpoint, no run folder."""

import contextlib
import os
import sys
from pathlib import Path
from typing import Any

from tidemill.app import build
from tidemill.app.assemble import prepare_torch
from tidemill.config.load import Loaded
from tidemill.contracts.events import Notice
from tidemill.contracts.footprint import Part
from tidemill.contracts.recorder import Sink
from tidemill.contracts.state import PolicyVersion
from tidemill.data.tokenizer import Tokenizer
from tidemill.errors import ConfigError
from tidemill.planning.budget import NO_LIMIT
from tidemill.recorders.attention import AttentionSink
from tidemill.recorders.fanout import Fanout
from tidemill.recorders.rich import RichSink
from tidemill.residency.manager import LeaseManager
from tidemill.rollout.collect import RolloutCollector
from tidemill.rollout.dump import RolloutDump
from tidemill.rollout.metrics import rollout_metrics

__all__ = ["check_out", "generate_and_score"]

SKIPPED = "no trainer is built: nothing is trained, evaluated, saved or exported, and run.dir is not touched"


def generate_and_score(loaded: Loaded, *, out: Path, limit: int, quiet: bool) -> dict[str, Any]:
    """`rollout.samples` answers to each of the first `limit` prompts (0 for all), dumped into `out`; their numbers.

    Raises ConfigError, before anything is generated, when `out` holds rollouts already or cannot be written to.
    """
    config = loaded.config
    check_out(out)
    console: Sink = AttentionSink(sys.stderr) if quiet else RichSink(steps=1, warm_up_steps=0, stream=sys.stderr)
    recorder = Fanout(sinks=[], live=[console])
    prepare_torch(config)
    with contextlib.ExitStack() as stack:
        stack.callback(recorder.close)
        recorder.emit(Notice(text=SKIPPED))
        tokenizer = Tokenizer(config.model, allow_special_tokens=config.data.allow_special_tokens)
        reward = build.build_reward(config, recorder.emit)
        stack.callback(reward.close)
        prompts = build.build_data(config, config.data.prompts, tokenizer, recorder.emit).all_prompts(limit)
        collector = RolloutCollector(
            environment=build.build_environment(config),
            reward=reward,
            sampling=build.train_sampling(config),
            samples=config.rollout.samples,
            emit=recorder.emit,
        )
        cluster = build.build_engine_cluster(config, recorder.emit, log_folder=out / "logs")
        stack.callback(cluster.close)
        engine = build.place_engine(config, cluster, recorder.emit, ranks=0)
        residency = LeaseManager(budget=NO_LIMIT, emit=recorder.emit, deadline=config.residency.deadline)
        with residency.awake(engine, Part.ALL):
            engine.load_pretrained(PolicyVersion(0, 0))
            groups = collector.collect(engine, prompts)
    dump = RolloutDump(out, sampling=build.train_sampling(config), otherwise="choose another --out")
    path = dump.write(0, groups)
    best = max((t for g in groups for t in g.trajectories), key=lambda t: -1.0 if t.reward is None else t.reward)
    return {
        "rollouts": str(path),
        "skipped": SKIPPED,
        "prompts": len(groups),
        **rollout_metrics(groups),
        "best": {"id": best.id, "prompt": best.prompt.text, "answer": best.text, "reward": best.reward},
    }


def check_out(out: Path) -> None:
    """Make the folder and try to write into it. Raises ConfigError when that fails, or it holds rollouts already."""
    probe = out / f".probe-{os.getpid()}"
    try:
        out.mkdir(parents=True, exist_ok=True)
        probe.write_bytes(b"")
        probe.unlink()
        taken = any(out.glob("step-*.jsonl"))
    except OSError as error:
        raise ConfigError(f"cannot write rollouts to {out}: {error.strerror or error}; choose another --out") from error
    if taken:
        raise ConfigError(f"cannot write rollouts to {out}: it holds some already; choose another --out")
