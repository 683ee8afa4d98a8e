"""A hand-over of one device between trainer and engine, whole: engine out, trainer in, weights, trainer out, cache in.

Trainer in float32 with AdamW, engine in bfloat16 (on a CPU float32), random weights, one process, a budget of `always`.
Each cycle makes a step, so that all of the state is other than it was, and generates a few tokens; neither counts.
`whole` is the wall time of all transitions and of the weight sync, checksums included: until the trainer is there, and
from the end of the update until the engine is ready, both with the device synchronised at the end. `bus` is what plain
pinned copies of the trainer's state take out and back, measured before and after in the same process; `whole_ratio` is
bus by whole.

`growth` is what was added from the fifth cycle (of fewer the middle one) to the last, with the engine awake: device
bytes as another process sees them, resident host bytes without those that the C library keeps for later, pages,
threads, file handles; of many cycles, the least of a tenth of them. `verified` says that nothing
grew, that parameters and moments came back equal, and that a small model which goes through all this makes the same
steps, to the last bit, as a twin that never sleeps.

    python -m benchmarks.handover [--shape qwen3-1.7b] [--engine vllm] [--cycles 10] [--json FILE]
"""

import argparse
import math
import os
import statistics
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.figures import Figure, report
from benchmarks.handover.house import ENGINES, Found, Series, hand_over, live_with_a_twin
from benchmarks.offload.runs import onlookers
from benchmarks.processes import Child, Failed, new_processes, one_gpu
from benchmarks.real_shape import write_model
from benchmarks.shapes import SHAPES, parameter_shapes
from tidemill.units import GIB, MIB

_TWIN_CYCLES = 5
# What says nothing: granularity of the driver, and of the C library.
_ALLOWED = {"device": 16.0 * MIB, "host": 64.0 * MIB, "pages": 0.0, "threads": 0.0, "files": 0.0}
_UNITS = {"device": "MiB", "host": "MiB", "pages": "MiB", "threads": "threads", "files": "files"}


def parsed(words: Sequence[str]) -> argparse.Namespace:
    """Command line, with what depends on the device filled in."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.handover", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", choices=("cpu", "cuda"), help="cuda where there is one")
    parser.add_argument("--shape", choices=sorted(SHAPES), help="qwen3-1.7b on a GPU, qwen3-29m on a CPU")
    parser.add_argument("--engine", choices=ENGINES, default="transformers")
    parser.add_argument("--cycles", type=int, default=10)
    parser.add_argument("--json", type=Path, help="write the JSON lines to this file too")
    chosen = parser.parse_args(words)
    if chosen.cycles < 3:
        parser.error(f"--cycles {chosen.cycles} leaves no cycle for the median; give 3 or more")
    chosen.device = chosen.device or ("cuda" if torch.cuda.is_available() else "cpu")
    chosen.shape = chosen.shape or ("qwen3-1.7b" if chosen.device == "cuda" else "qwen3-29m")
    return chosen


def measured(chosen: argparse.Namespace, folder: Path) -> tuple[Found, bool]:
    """What the process found, counts of the device included, and whether the small model equals its twin."""
    context = new_processes(chosen.device)
    for shape in {chosen.shape, "tiny"}:
        _in_a_process(context, write_model, folder / shape, shape)
    size = 12 * sum(math.prod(shape) for shape in parameter_shapes(chosen.shape))
    with onlookers(context, chosen.device, 1) as (eye,), one_gpu(0):
        model, engine = str(folder / chosen.shape), chosen.engine
        child = Child(context, hand_over, model, size, chosen.device, chosen.cycles, engine)
        try:
            used = []
            for number in range(1, chosen.cycles + 1):
                child.answer()
                print(f"\rhand-over {number} of {chosen.cycles}", end="", file=sys.stderr, flush=True)
                used.append(eye.used())
                child.pipe.send("seen")
            print(file=sys.stderr)
            found: Found = child.answer()
        finally:
            child.end()
        if chosen.device == "cuda":
            found.counts["device"] = used
        twin = Child(context, live_with_a_twin, str(folder / "tiny"), chosen.device, _TWIN_CYCLES, engine)
        try:
            return found, bool(twin.answer())
        finally:
            twin.end()


def _in_a_process(context: Any, work: Any, *arguments: Any) -> None:
    """This process shall hold no memory of a GPU."""
    process = context.Process(target=work, args=arguments)
    process.start()
    process.join()
    if process.exitcode:
        raise SystemExit(f"{work.__name__}{arguments} ended with exit code {process.exitcode}")


def growth(counts: Series) -> dict[str, float]:
    """By name, what was added since things settled: of a few cycles the least, for what comes and goes is no growth."""
    found = {}
    for name, values in counts.items():
        first = min(4, len(values) // 2)
        few = max(1, len(values) // 10)
        found[name] = min(values[-few:]) - min(values[first : first + few])
    return found


def figures_of(found: Found, shape: str, twin: bool, engine: str = "transformers") -> list[Figure]:
    """All lines. An uneven twin makes every line unverified: its figures are of something that trains wrongly."""
    grown = growth(found.counts)
    flat = all(value <= _ALLOWED[name] for name, value in grown.items())
    verified = found.verified and twin and flat
    for name, right in (("came back whole", found.verified), ("equal to the twin", twin), ("nothing grew", flat)):
        print(f"{name}: {'yes' if right else 'NO'}", file=sys.stderr)

    case = shape if engine == "transformers" else f"{shape}, {engine}"

    def figure(metric: str, value: float, unit: str, cycle: str, arm: str = "tidemill") -> Figure:
        return Figure(
            benchmark="handover", arm=arm, case=case, metric=metric, value=value, unit=unit, cycle=cycle,
            verified=verified,
        )  # fmt: skip

    ways = [[second for limit in found.limits for second in limit[way]] for way in (0, 1)]
    bus = sum(statistics.median(way) for way in ways)
    figures = [figure("state", found.bytes / GIB, "GiB", "first"), figure("bus", bus, "s", "median", "pinned-copy")]
    for cycle, pick in (("first", slice(0, 1)), ("median", slice(2, None))):
        for name, seconds in found.seconds.items():
            figures.append(figure(name, statistics.median(seconds[pick] or seconds), "s", cycle))
        whole = statistics.median(found.seconds["whole"][pick])
        figures.append(figure("whole_ratio", bus / whole, "of pinned copies", cycle))
    for name, value in grown.items():
        scale = MIB if _UNITS[name] == "MiB" else 1
        figures.append(figure(f"{name}_growth", value / scale, _UNITS[name], "median"))
    return figures


def main(words: Sequence[str]) -> int:
    """1 when anything was not as it should be."""
    chosen = parsed(words)
    if chosen.device == "cuda":
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    else:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    try:
        with tempfile.TemporaryDirectory(prefix="tidemill-handover-") as folder:
            found, twin = measured(chosen, Path(folder))
    except Failed as failure:
        print(failure, file=sys.stderr)
        return 1
    figures = figures_of(found, chosen.shape, twin, chosen.engine)
    report(figures, chosen.json)
    return 0 if figures[0].verified else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
