"""Tokens a second of each engine of ours, against the same engine without us.

Every arm lives in a process of its own, all on one device, and they take turns, in another order each round; prompts
are other ones each round. `first` is the first round, `median` that of the others; a ratio is of the same round, since
neighbours in time share whatever else the machine is doing. `verified` says that the log-probs are those of a whole
forward of transformers: within 1e-4 nats in the mean in float32 (0.05 for vLLM, whose kernels differ), 0.05 in
bfloat16.

    python -m benchmarks.rollout --case qwen3-4b --engine vllm [--rounds 5] [--json FILE]
    OMP_NUM_THREADS=2 python -m benchmarks.rollout --case short-answers
"""

import argparse
import contextlib
import math
import os
import statistics
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import torch
import transformers

from benchmarks.figures import Figure, Lines
from benchmarks.processes import Child, new_processes
from benchmarks.rollout.arms import ARMS, Place, serve
from benchmarks.rollout.cases import CASES, write_case

CACHE_BYTES = {"cpu": 1 << 28, "cuda": 24 << 30}
BOUNDS = {("transformers", "float32"): 1e-4}
BOUND = 0.05


@contextlib.contextmanager
def children(engine: str, arms: list[str], place: Place, case: str) -> Iterator[dict[str, Child]]:
    """The arms, built one after another; they end with the block."""
    os.environ.setdefault("GOMP_SPINCOUNT", "0")  # who has no turn leaves the cores alone
    made: dict[str, Child] = {}
    try:
        for arm in arms:
            made[arm] = Child(new_processes("cuda"), serve, engine, arm, place, CASES[case])
            made[arm].answer()
        yield made
    finally:
        for child in made.values():
            child.end()


def measure(engine: str, case: str, place: Place, *, rounds: int, arms: list[str]) -> list[Figure]:
    """Rates and ratios of one case."""
    seconds: dict[str, list[float]] = {arm: [] for arm in arms}
    bound = BOUNDS.get((engine, place.dtype), BOUND)
    with children(engine, arms, place, case) as made:
        for turn in range(rounds + 1):
            for arm in arms if turn % 2 == 0 else reversed(arms):
                seconds[arm].append(made[arm].ask(turn))
        errors = {arm: made[arm].ask("check") for arm in arms}
    tokens = CASES[case].rows * CASES[case].new
    base = arms[1] if len(arms) > 1 else arms[0]
    figures: list[Figure] = []
    for arm in arms:
        ratios = [other / spent for spent, other in zip(seconds[arm], seconds[base], strict=True)]
        rows = [("rate", [tokens / spent for spent in seconds[arm]], "tokens/s"), ("ratio", ratios, f"of {base}")]
        rows += [("mismatch", [errors[arm]], "nats")] if math.isfinite(errors[arm]) else []
        for metric, values, unit in rows:
            cycles = {"first": values[0], "median": statistics.median(values[1:] or values)}
            figures += [
                Figure(
                    benchmark=f"rollout.{engine}",
                    arm=arm,
                    case=case,
                    metric=metric,
                    value=value,
                    unit=unit,
                    cycle=cycle,
                    verified=not errors[arm] > bound,  # an arm that has no log-probs claims nothing
                )
                for cycle, value in cycles.items()
            ]
    return figures


def main(words: list[str]) -> int:
    """Exit code 1 when something is not verified."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engine", choices=sorted(ARMS), default="transformers")
    parser.add_argument("--case", choices=sorted(CASES), action="append", help="may be given several times")
    parser.add_argument("--arm", action="append", help="only these; the second is the base of the ratios")
    parser.add_argument("--device", choices=["auto", "cpu", "cuda"], default="auto")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], help="bfloat16 on a GPU, float32 on a CPU")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(words)
    arms = options.arm or list(ARMS[options.engine])
    if unknown := set(arms) - set(ARMS[options.engine]):
        parser.error(f"{options.engine} has no arm {', '.join(sorted(unknown))}: {', '.join(ARMS[options.engine])}")
    cuda = torch.cuda.is_available() if options.device == "auto" else options.device == "cuda"
    device = "cuda" if cuda else "cpu"
    dtype = options.dtype or ("bfloat16" if cuda else "float32")
    lines = Lines(options.json)
    for case in options.case or ["short-answers", "quickstart"]:
        with tempfile.TemporaryDirectory() as name:
            write_case(Path(name), CASES[case])
            place = Place(folder=Path(name), device=device, dtype=dtype, cache_bytes=CACHE_BYTES[device])
            lines.tell(measure(options.engine, case, place, rounds=options.rounds, arms=arms))
    print(lines.table())
    print(f"torch {torch.__version__}, transformers {transformers.__version__}, {device}, {dtype}")
    return 0 if all(figure.verified for figure in lines.figures) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
