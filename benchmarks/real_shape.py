"""A whole run with a model of a real size (random weights): what sleep, wake, hand-over, save and generation take.

Trainer in float32 with AdamW, engine in bfloat16 on a GPU, `residency.offload = always`: one sleep and one wake of the
trainer a step, a checkpoint in the middle. Rates of sleep and wake are given as a part of what a pinned copy
reaches, measured before and after in the same process. `verified` says that the last checkpoint was read back
whole and the exported model holds its weights.

    python -m benchmarks.real_shape --shape qwen3-0.6b --steps 8 [--engine vllm] [--device cuda] [--json FILE]
"""

import argparse
import contextlib
import json
import random
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, GenerationConfig, Qwen3Config

from benchmarks.offload.runs import onlookers
from benchmarks.processes import new_processes
from benchmarks.shapes import SHAPES
from tidemill.testing.tiny import EOS_ID, PAD_ID, make_tiny_tokenizer, sort_digits_problem


def write_model(folder: Path, shape: str) -> None:
    """A Qwen3 folder of this shape, in bfloat16, tied, with the tiny tokenizer."""
    hidden, layers, heads, kv_heads, size, intermediate, vocabulary = SHAPES[shape]
    config = Qwen3Config(
        hidden_size=hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=size,
        intermediate_size=intermediate,
        vocab_size=vocabulary,
        tie_word_embeddings=True,
        max_position_embeddings=4096,
        eos_token_id=EOS_ID,
        pad_token_id=PAD_ID,
        dtype="bfloat16",
    )
    torch.manual_seed(0)
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.generation_config = GenerationConfig(eos_token_id=EOS_ID, pad_token_id=PAD_ID)
    model.save_pretrained(folder)
    make_tiny_tokenizer("characters").save_pretrained(folder)


def write_prompts(path: Path) -> None:
    """Prompts of the quick start's task."""
    rng = random.Random(0)
    rows = [dict(zip(("prompt", "label"), sort_digits_problem(rng), strict=True)) for _ in range(256)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def pinned_copy(size: int) -> tuple[float, float]:
    """Bytes a second of a pinned copy of `size` bytes, device to host and back; of a plain copy without a GPU."""
    cuda = torch.cuda.is_available()
    host = torch.empty(size, dtype=torch.uint8, pin_memory=cuda)
    device = torch.ones(size, dtype=torch.uint8, device="cuda" if cuda else "cpu")
    rates = []
    for target, source in ((host, device), (device, host)):
        seconds = []
        for _ in range(3):
            began = time.perf_counter()
            target.copy_(source, non_blocking=True)
            if cuda:
                torch.cuda.synchronize()
            seconds.append(time.perf_counter() - began)
        rates.append(size / min(seconds))
    return rates[0], rates[1]


@contextlib.contextmanager
def watched(device: str) -> Iterator[list[float]]:
    """Within, a process of its own looks at the device's bytes in use all the time: the peak, all contexts included."""
    peak, over = [0.0], threading.Event()
    with onlookers(new_processes(device), device, 1) as (eye,):

        def look() -> None:
            while not over.wait(0.02):
                peak[0] = max(peak[0], eye.used())

        watcher = threading.Thread(target=look, daemon=True)
        watcher.start()
        try:
            yield peak
        finally:
            over.set()
            watcher.join()


def run(folder: Path, arguments: argparse.Namespace) -> dict[str, Any]:
    """One run through the command line's own entry; the lines of its files."""
    from tidemill.cli.main import main

    every = arguments.checkpoint_every or max(arguments.steps // 2, 1)
    words = [
        f"model={arguments.models}", f"data.prompts={folder / 'prompts.jsonl'}", f"run.dir={folder / 'run'}",
        f"steps={arguments.steps}", f"run.device={arguments.device}", "residency.offload=always",
        "rollout.prompts=16", "rollout.samples=8", f"rollout.sampling.max_new_tokens={arguments.new_tokens}",
        "engine.max_batch=128", f"checkpoint.every={every}", "trainer.optimizer.lr=1e-6",
        "data.max_prompt_tokens=32", "checkpoint.keep_last=1", f"engine.use={arguments.engine}",
    ]  # fmt: skip
    with watched("cuda" if torch.cuda.is_available() and arguments.device != "cpu" else "cpu") as peak:
        code = main(["run", *words, "--quiet"])
    if code:
        raise SystemExit(code)
    verified = main(["ckpt", "verify", str(folder / "run"), "--json"]) == 0
    read = lambda name: [json.loads(line) for line in (folder / "run" / name).read_text().splitlines()]  # noqa: E731
    return {"events": read("events.jsonl"), "metrics": read("metrics.jsonl"), "verified": verified, "peak": peak[0]}


def figures(found: dict[str, Any], rates: tuple[float, float], shape: str) -> list[dict[str, Any]]:
    """JSON lines in the shape of all benchmarks."""
    phases = [event for event in found["events"] if event["kind"] == "phase"]
    memory = [event for event in found["events"] if event["kind"] == "memory"]
    # What crosses the bus is what a checkpoint holds; host bytes count spare pages too.
    state_bytes = max(event["bytes"] for event in found["events"] if event.get("status") == "staged")
    host_bytes = max(event["host"].get("trainer", 0) for event in memory)
    lines: list[dict[str, Any]] = []

    def add(metric: str, values: list[float], unit: str, scale: float = 1.0) -> None:
        if not values:
            return
        cases = {"first": values[0], "median": statistics.median(values[2:] or values)}
        for cycle, value in cases.items():
            lines.append(
                {"benchmark": "real_shape", "arm": "tidemill", "case": shape, "metric": metric,
                 "value": round(value * scale, 4), "unit": unit, "cycle": cycle, "verified": found["verified"]}
            )  # fmt: skip

    of = lambda name, owner: [p["seconds"] for p in phases if p["name"] == name and p["owner"] in (owner, "")]  # noqa: E731
    add("sleep", of("sleep", "trainer"), "s")
    add("wake_up", of("wake_up", "trainer"), "s")
    add("sleep_ratio", [state_bytes / s / rates[0] for s in of("sleep", "trainer")], "of pinned copy")
    add("wake_ratio", [state_bytes / s / rates[1] for s in of("wake_up", "trainer")], "of pinned copy")
    for name in ("generate", "train", "update_weights", "save_stall", "save_durable"):
        add(name, [p["seconds"] for p in phases if p["name"] == name], "s")
    tokens = [m["rollout/tokens"] for m in found["metrics"] if "rollout/tokens" in m]
    add("generate_rate", [n / s for n, s in zip(tokens, of("generate", "engine"), strict=False)], "tokens/s")
    mismatch = [m["mismatch/logprob_abs_mean"] for m in found["metrics"] if "mismatch/logprob_abs_mean" in m]
    add("mismatch", mismatch, "nats")
    add("state_bytes", [float(state_bytes)], "GiB", 1 / 2**30)
    add("host_bytes", [float(host_bytes)], "GiB", 1 / 2**30)
    add("device_peak", [float(found["peak"])], "GiB", 1 / 2**30)
    return lines


def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=sorted(SHAPES), default="tiny")
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--engine", choices=("transformers", "vllm"), default="transformers")
    parser.add_argument("--checkpoint-every", type=int, default=0, help="steps; in the middle and at the end without")
    parser.add_argument("--models", type=Path, help="write the model here, where its run has no room for it")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        arguments.models = arguments.models or folder / "model"
        write_model(arguments.models, arguments.shape)
        write_prompts(folder / "prompts.jsonl")
        before = pinned_copy(1 << 30)
        found = run(folder, arguments)
        after = pinned_copy(1 << 30)
    lines = figures(found, (max(before[0], after[0]), max(before[1], after[1])), arguments.shape)
    for line in lines:
        print(json.dumps(line))
    if arguments.json:
        arguments.json.write_text("".join(json.dumps(line) + "\n" for line in lines))
    for line in lines:
        print(f"{line['metric']:>20} {line['cycle']:>7} {line['value']:>12} {line['unit']}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
