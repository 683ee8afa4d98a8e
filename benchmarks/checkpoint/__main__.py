"""What a save costs a trainer that sleeps between its steps, how soon it is durable, and how fast it is read back.

Arms: `tidemill-asleep` (marked under the lease, written from the host copy while the trainer sleeps), `tidemill-awake`
(the trainer stays awake), `dcp` and `dcp-async` (torch.distributed.checkpoint), `dcp-async-pinned` (its pinned stager,
kept; a GPU and torch 2.13), `torch-save`, `safetensors`. Everybody's files and folders are fsynced before a save counts
as durable. Arms take turns, in fresh processes, round by round; figures are medians of rounds. What was saved is
compared with what is loaded, by checksums of all bytes.

`stall`: seconds by which cycles of train, sleep, rollout and wake with one save, until it is durable and at least two
of them, are longer than as many without; `lost_...`: of that, in one part of the cycle; `reported`: for how long the
code itself says that it waited because of the save. The rollout is a stub as long as a raw write of the state; in
`_half` half of that, where a wait is unavoidable.
`durable`: from the call on. `raw-write`, `raw-read`: the same bytes, O_DIRECT and fsync where that is allowed, not
cached, in the same processes. `commit_ratio`: writing and committing alone. `load_put`: of a load, what follows
verification, which puts the bytes into the host copy. `host_peak`: host memory at most, the copy for sleep included,
on a CPU without what stands for the device. Case `export`: a Hugging Face export of float32 masters from the host copy,
`written` by bytes handed over.

    python -m benchmarks.checkpoint [--gib 12] [--case large] [--arm tidemill-asleep] [--json FILE] [--plot FILE]
"""

import argparse
import os
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.checkpoint.arms import ARMS, arms_on, is_ours
from benchmarks.checkpoint.exports import run_export
from benchmarks.checkpoint.runs import Round, figures_of, limit_figures, run_arm
from benchmarks.figures import Figure, Lines
from benchmarks.offload.cases import Case
from benchmarks.processes import new_processes
from benchmarks.real_shape import write_model
from benchmarks.shapes import SHAPES
from tidemill.checkpoint.durable import free_bytes
from tidemill.units import GIB, format_bytes

CASES = ("large", "small", "export")
# Saves that lie there at once, and a raw write beside them.
_ROOM = 3
Tell = Callable[[Sequence[Figure]], None]


def parsed(words: Sequence[str]) -> argparse.Namespace:
    """Command line, with what depends on the device filled in."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.checkpoint",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--device", choices=("cpu", "cuda"), help="cuda where there is one")
    parser.add_argument("--gib", type=float, help="size of large: 12 on a GPU, 0.5 on a CPU")
    parser.add_argument("--small-gib", type=float, help="size of small: 4 on a GPU, 0.1 on a CPU")
    parser.add_argument("--shape", choices=sorted(SHAPES), help="of export: qwen3-1.7b on a GPU, qwen3-29m on a CPU")
    parser.add_argument("--case", action="append", choices=CASES, help="only this; may be repeated")
    parser.add_argument("--arm", action="append", choices=tuple(ARMS), help="only this; may be repeated")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--folder", type=Path, help="write there; a temporary folder")
    parser.add_argument("--json", type=Path, help="write the JSON lines to this file too")
    parser.add_argument("--plot", type=Path, help="write a picture: svg, png or pdf, by its name")
    chosen = parser.parse_args(words)
    for name, least in (("gib", 0.001), ("small_gib", 0.001), ("rounds", 1)):
        value = getattr(chosen, name)
        if value is not None and not least <= value < 10_000:
            parser.error(f"--{name.replace('_', '-')} {value} is no size to measure with; give {least:g} or more")
    if chosen.folder is not None and not chosen.folder.is_dir():
        parser.error(f"--folder {chosen.folder} is no folder")
    chosen.device = chosen.device or ("cuda" if torch.cuda.is_available() else "cpu")
    on_cuda = chosen.device == "cuda"
    chosen.gib = chosen.gib or (12 if on_cuda else 0.5)
    chosen.small_gib = chosen.small_gib or (4 if on_cuda else 0.1)
    chosen.shape = chosen.shape or ("qwen3-1.7b" if on_cuda else "qwen3-29m")
    chosen.case = chosen.case or list(CASES)
    return chosen


def arms_of(chosen: argparse.Namespace) -> list[str]:
    """Those that were asked for and can run here; which cannot is told on standard error."""
    there, left_out = arms_on(chosen.device)
    if left_out:
        print(left_out, file=sys.stderr)
    return [arm for arm in chosen.arm or there if arm in there]


def measure(chosen: argparse.Namespace, folder: Path, tell: Tell) -> None:
    """All figures of all cases, told as soon as an arm is through."""
    context, arms = new_processes(chosen.device), arms_of(chosen)
    for name in chosen.case:
        if name == "export":
            tell(_export(chosen, context, folder))
            continue
        case = Case(
            name=name,
            size=int((chosen.small_gib if name == "small" else chosen.gib) * GIB),
            shape=chosen.shape,
            device=chosen.device,
        )
        _check_room(folder, case)
        compare(context, arms, case, folder, chosen.rounds, tell)


def compare(context: Any, arms: Sequence[str], case: Case, folder: Path, count: int, tell: Tell) -> None:
    """One case: every arm in turn, so many rounds."""
    rounds: dict[str, list[Round]] = {arm: [] for arm in arms}
    failed: set[str] = set()
    for number in range(count):
        for arm in rounds:
            print(f"{case.name}, {arm}, round {number + 1} of {count}", file=sys.stderr)
            came = run_arm(context, arm, case, folder)
            rounds[arm] += came
            failed |= set() if came else {arm}
            if number + 1 == count:
                tell(figures_of(case.name, arm, [] if arm in failed else rounds[arm], case.device))
    seen = [one for came in rounds.values() for one in came]
    tell(limit_figures(case.name, seen) if seen else [])


def _export(chosen: argparse.Namespace, context: Any, folder: Path) -> list[Figure]:
    # In a process of its own: this one shall hold no memory of a GPU.
    with tempfile.TemporaryDirectory(prefix="model-", dir=folder) as model:
        print(f"export, {chosen.shape}", file=sys.stderr)
        writer = context.Process(target=write_model, args=(Path(model), chosen.shape))
        writer.start()
        writer.join()
        if writer.exitcode:
            raise SystemExit(f"no model of shape {chosen.shape} could be written (exit code {writer.exitcode})")
        return run_export(context, Path(model), chosen.device, folder)


def _check_room(folder: Path, case: Case) -> None:
    if (free := free_bytes(folder)) < _ROOM * case.size:
        raise SystemExit(
            f"{folder} has {format_bytes(free)} free and {format_bytes(_ROOM * case.size)} are needed; choose another "
            f"--folder, or less with --gib and --small-gib"
        )


def main(words: Sequence[str]) -> int:
    """1 when an arm of ours failed or lost contents."""
    chosen = parsed(words)
    if chosen.device == "cpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    lines = Lines(chosen.json)
    with tempfile.TemporaryDirectory(prefix="tidemill-checkpoint-", dir=chosen.folder) as folder:
        measure(chosen, Path(folder), lines.tell)
    print(lines.table())
    if chosen.plot:
        from benchmarks.checkpoint.plot import draw

        draw(lines.figures, chosen.plot)
    return 0 if all(figure.verified for figure in lines.figures if is_ours(figure.arm)) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
