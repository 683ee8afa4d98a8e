"""Makes what the quick start learns with, on the spot and the same on every machine: a tiny model and its data.

Task: sort eight digits, `73914082>` to `01234789`. Writes `build/quickstart/` with

    model/          Qwen3, 2 layers, hidden size 128, random weights, character tokenizer
    warm_up.jsonl   12,800 prompts with the answer as label: 100 supervised steps of 128
    train.jsonl      2,400 prompts for reinforcement learning: 300 steps of 8
    eval.jsonl         256 prompts that are in neither

No prompt occurs twice. Run again, it finds all in place and does nothing.
"""

import argparse
import json
import random
import shutil
import sys
from pathlib import Path

ROWS = {"eval": 256, "train": 2400, "warm_up": 12_800}
VERSION = 1
STAMP = "prepared.json"


def write_problems(folder: Path) -> None:
    """The three files, from one stream of problems without repetition."""
    from tidemill.testing.tiny import sort_digits_problem

    rng, seen = random.Random(2026), set()
    for name, count in ROWS.items():
        with (folder / f"{name}.jsonl").open("w", encoding="utf-8") as file:
            for row in range(count):
                prompt, answer = sort_digits_problem(rng)
                while prompt in seen:
                    prompt, answer = sort_digits_problem(rng)
                seen.add(prompt)
                file.write(json.dumps({"id": f"{name}-{row}", "prompt": prompt, "label": answer}) + "\n")


def prepare(folder: Path) -> str:
    """Fill `folder`, whole or not at all; what was done, in a sentence."""
    stamp = folder / STAMP
    if stamp.exists() and json.loads(stamp.read_text())["version"] == VERSION:
        return f"{folder} is ready (made before)"
    if folder.exists() and not stamp.exists() and any(folder.iterdir()):
        raise SystemExit(f"cannot prepare {folder}: it holds something else; move it away or pass another --out")
    from transformers.utils import logging

    from tidemill.testing.tiny import make_tiny_model

    logging.disable_progress_bar()
    partial = folder.with_name(folder.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    make_tiny_model(partial / "model", family="qwen3", hidden=128, layers=2, heads=4, kv_heads=4, seed=0)
    write_problems(partial)
    (partial / STAMP).write_text(json.dumps({"version": VERSION}) + "\n")
    shutil.rmtree(folder, ignore_errors=True)
    partial.rename(folder)
    counts = ", ".join(f"{name}.jsonl with {count:,} rows" for name, count in ROWS.items())
    return f"made {folder}: model/ (Qwen3, 0.44M parameters, random weights), {counts}"


def main(arguments: list[str]) -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    default = Path(__file__).resolve().parents[2] / "build" / "quickstart"
    parser.add_argument("--out", type=Path, default=default, help="folder to fill (default: build/quickstart)")
    print(prepare(parser.parse_args(arguments).out))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
