"""Writes prompts and answers of three reasoning-gym tasks, the same on every machine.

    pip install 'tidemill[reasoning]'
    python recipes/reasoning/prepare.py

Fills `build/reasoning/` with a folder a task, each with `train.jsonl` and `eval.jsonl` of which no question is in both:

    chain_sum         sums and differences of two digits; there are 200 such questions: 160 to train on, 40 held out
    basic_arithmetic  sums of two numbers below 100: 2,000 to train on, 200 held out
    letter_counting   how often a letter is in three to six words: 4,000 to train on, 200 held out

A row is a chat of one message, its label the right number. Run again, it finds all in place and does nothing.
"""

import argparse
import json
import random
import shutil
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

TASKS: dict[str, dict[str, Any]] = {
    "chain_sum": {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1},
    "basic_arithmetic": {
        "min_terms": 2,
        "max_terms": 2,
        "min_digits": 1,
        "max_digits": 2,
        "operators": ["+"],
        "allow_parentheses": False,
        "allow_negation": False,
    },
    "letter_counting": {"min_words": 3, "max_words": 6},
}
ROWS = {"chain_sum": (160, 40), "basic_arithmetic": (2000, 200), "letter_counting": (4000, 200)}
"""Rows to train on, and held out."""
SEED = 2026
STAMP = "prepared.json"


def generated(task: str) -> Iterable[Mapping[str, Any]]:
    """Questions with answers, as reasoning-gym makes them; many come more than once."""
    import reasoning_gym

    found: Iterable[Mapping[str, Any]] = reasoning_gym.create_dataset(task, size=20_000, seed=SEED, **TASKS[task])
    return found


def distinct(items: Iterable[Mapping[str, Any]], count: int) -> list[tuple[str, int]]:
    """The first `count` different questions with their answers. Raises SystemExit when there are fewer."""
    answers: dict[str, int] = {}
    for item in items:
        answers.setdefault(item["question"], int(item["answer"]))
        if len(answers) == count:
            return list(answers.items())
    raise SystemExit(f"cannot find {count} different questions: there are {len(answers)}; another reasoning-gym?")


def write_task(folder: Path, items: Iterable[Mapping[str, Any]], rows: tuple[int, int]) -> None:
    """`train.jsonl` and `eval.jsonl`, drawn from all the questions together, so that both are alike."""
    pairs = distinct(items, sum(rows))
    random.Random(SEED).shuffle(pairs)
    folder.mkdir(parents=True)
    for name, part in (("train", pairs[: rows[0]]), ("eval", pairs[rows[0] :])):
        with (folder / f"{name}.jsonl").open("w", encoding="utf-8") as file:
            for number, (question, answer) in enumerate(part):
                chat = [{"role": "user", "content": question}]
                file.write(json.dumps({"id": f"{name}-{number}", "prompt": chat, "label": answer}) + "\n")


def prepare(folder: Path) -> str:
    """Fill `folder`, whole or not at all; what was done, in a sentence."""
    from importlib.metadata import version

    made = {"reasoning_gym": version("reasoning_gym"), "rows": {task: list(rows) for task, rows in ROWS.items()}}
    stamp = folder / STAMP
    if stamp.exists() and json.loads(stamp.read_text()) == made:
        return f"{folder} is ready (made before)"
    if folder.exists() and not stamp.exists() and any(folder.iterdir()):
        raise SystemExit(f"cannot prepare {folder}: it holds something else; move it away or pass another --out")
    partial = folder.with_name(folder.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    for task, rows in ROWS.items():
        write_task(partial / task, generated(task), rows)
    (partial / STAMP).write_text(json.dumps(made) + "\n")
    shutil.rmtree(folder, ignore_errors=True)
    partial.rename(folder)
    counts = ", ".join(f"{task} ({train:,} rows and {held:,} held out)" for task, (train, held) in ROWS.items())
    return f"made {folder}: {counts}"


def main(arguments: list[str]) -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    default = Path(__file__).resolve().parents[2] / "build" / "reasoning"
    parser.add_argument("--out", type=Path, default=default, help="folder to fill (default: build/reasoning)")
    print(prepare(parser.parse_args(arguments).out))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
