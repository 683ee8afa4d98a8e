"""How fast weights are handed from a trainer to an engine, and what comparing them costs, against a device copy.

Carriers: `direct` (one process), `ipc` (two processes on one GPU, through shared buffers on it) and `host` (two
processes, through host memory, and here through the driver's pipes too, which a real cluster goes past). Each hands
over with `weights.verify` as `always`, `sampled` and `off`, in turn, weights that changed in between. The trainer's are
float32 on a GPU, as masters are, the engine's bfloat16; on a CPU both are float32. Cases: shapes of models, and `small`
(10,000 tensors). Seconds are wall time between synchronisations of the device; bytes are the engine's live bytes.

`copy_ratio` is a plain device copy of as many bytes, measured in the same process, over the hand-over (a float32
source alone makes that 0.67 at best). `hash_ratio` is how fast checksums read against a plain sum over flat memory
that reads as much: `hash` of the engine's weights, `hash_cast` of the trainer's as they would be cast, `hash_one` of
all bytes as one tensor. `verify` is what a run records as `time/verify`, `verify_share` what comparing adds, as a part
of the whole. `peak_extra` is device memory at most beyond trainer and engine. `verified`: contents were equal, also
where nothing was compared.

    python -m benchmarks.weights [--case small] [--shape qwen3-4b] [--carrier ipc] [--json FILE]
"""

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

from benchmarks.figures import Figure, Lines
from benchmarks.processes import Child, new_processes
from benchmarks.shapes import SHAPES
from benchmarks.weights.limits import Limits
from benchmarks.weights.runs import in_one_process, in_two_processes
from benchmarks.weights.sides import Case
from tidemill.units import GIB

_ON_GPU = ["qwen3-0.6b", "qwen3-1.7b", "qwen3-4b", "qwen3-8b"]
# Through pipes, more takes minutes.
_MOST_BY_HOST = 2 * GIB


def parsed(words: Sequence[str]) -> argparse.Namespace:
    """Command line, with what depends on the device filled in."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.weights", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", choices=("cpu", "cuda"), default=None, help="cuda where there is one")
    parser.add_argument("--case", action="append", choices=("small", "shape"), help="only this; may be repeated")
    parser.add_argument("--shape", action="append", choices=sorted(SHAPES), help="of the case shape; may be repeated")
    parser.add_argument("--carrier", action="append", choices=("direct", "ipc", "host"), help="only this; repeatable")
    parser.add_argument("--source", choices=("float32", "bfloat16"), help="the trainer's dtype")
    parser.add_argument("--target", choices=("float32", "bfloat16"), help="the engine's dtype")
    parser.add_argument("--cycles", type=int, default=7)
    parser.add_argument("--json", type=Path, help="write the JSON lines to this file too")
    chosen = parser.parse_args(words)
    if chosen.cycles < 3:
        parser.error(f"--cycles {chosen.cycles} leaves no cycle for the median; give 3 or more")
    chosen.device = chosen.device or ("cuda" if torch.cuda.is_available() else "cpu")
    on_cuda = chosen.device == "cuda"
    if not on_cuda and "ipc" in (chosen.carrier or ()):
        parser.error("--carrier ipc shares memory of a GPU; there is none")
    cases = chosen.case or (["shape"] if chosen.shape else ["shape", "small"])
    shapes = chosen.shape or (_ON_GPU if on_cuda else ["tiny"])
    chosen.cases = [name for case in cases for name in (shapes if case == "shape" else ["small"])]
    chosen.carrier = chosen.carrier or (["direct", "ipc", "host"] if on_cuda else ["direct", "host"])
    chosen.source = chosen.source or "float32"
    chosen.target = chosen.target or ("bfloat16" if on_cuda else "float32")
    return chosen


def main(words: Sequence[str]) -> int:
    """1 when a hand-over failed or lost contents."""
    chosen = parsed(words)
    if chosen.device == "cpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    lines, failures = Lines(chosen.json), 0
    for name in chosen.cases:
        case = Case(name=name, device=chosen.device, source=chosen.source, target=chosen.target)
        limits: Limits = {"copy": float("nan")}
        for carrier in sorted(chosen.carrier, key=["direct", "ipc", "host"].index):
            if carrier == "host" and case.nbytes() > _MOST_BY_HOST:
                continue
            print(f"{name}, {carrier}", file=sys.stderr)
            try:
                figures, limits = _run(case, carrier, chosen.cycles, limits)
                lines.tell(figures)
            except Exception as error:
                print(f"{name}, {carrier} failed: {error}", file=sys.stderr)
                failures += 1
    print(lines.table())
    return 1 if failures or not all(figure.verified for figure in lines.figures) else 0


def _run(case: Case, carrier: str, cycles: int, limits: Limits) -> tuple[list[Figure], Limits]:
    if carrier != "direct":
        return in_two_processes(case, carrier, cycles, limits), limits
    child = Child(new_processes(case.device), in_one_process, case, cycles)
    try:
        answer: tuple[list[Figure], Limits] = child.answer()
        return answer
    finally:
        child.end()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
