"""How fast memory sleeps and wakes, against a plain pinned copy of the same live bytes in the same processes.

Arms: `tidemill` (in case `fsdp` the trainer itself, elsewhere its saver), `tms-default` and `tms-retained`
(torch_memory_saver, where it is installed, without and with its host backup retained), `per-tensor-cpu` (`.cpu()` and
`.to(device)` of each tensor), and the limit, `pinned-copy`; on a CPU the limit is a plain copy. Arms take turns, in
fresh processes, round by round; each measures the limit before and after its own cycles. Seconds are wall time between
synchronisations of the device; bytes are live tensor bytes for everyone. `first` is the first cycle, `median` that of
cycles 3 to the last, and each the worst over ranks and rounds. Contents are compared by checksums of all bytes.

`kept`: device bytes asleep that the arm knows of. `context`: what a process takes of the device, as another one sees
it, that has computed a checksum, made a stream and holds nothing; `left`: what the arm leaves there besides, asleep.
`host_peak`: host memory at most; on a CPU this is where what stands for the device lies too. `drift`: how far the limit
moved between before and after. On a GPU each sleep lasts 0.2 s, less than an engine's turn. `swap` and
`first_slab`: see `benchmarks.offload.swaps`.

    python -m benchmarks.offload [--gib 12] [--small-tensors] [--case large] [--ranks 2] [--json FILE] [--plot FILE]
"""

import argparse
import os
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from benchmarks.figures import Figure, Lines
from benchmarks.offload.arms import Settings, arms_on, cycles_of
from benchmarks.offload.cases import Case
from benchmarks.offload.runs import Eye, Round, figures_of, limit_figures, onlookers, run_arm
from benchmarks.offload.swaps import run_swaps
from benchmarks.processes import new_processes
from benchmarks.real_shape import write_model
from benchmarks.shapes import SHAPES
from tidemill.residency.savers.host_arena import HostArenaSaver
from tidemill.units import GIB

CASES = ("large", "small", "flat", "fsdp")
Tell = Callable[[Sequence[Figure]], None]


def parsed(words: Sequence[str]) -> argparse.Namespace:
    """Command line, with what depends on the device filled in."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.offload", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", choices=("cpu", "cuda"), default=None, help="cuda where there is one")
    parser.add_argument("--gib", type=float, help="size of large and flat: 12 on a GPU, 0.5 on a CPU")
    parser.add_argument("--small-gib", type=float, help="size of small: 4 on a GPU, 0.25 on a CPU")
    parser.add_argument("--small-tensors", action="store_true", help="only the case small")
    parser.add_argument("--case", action="append", choices=(*CASES, "swap"), help="only this; may be repeated")
    parser.add_argument("--arm", action="append", help="only this; may be repeated")
    parser.add_argument("--shape", choices=sorted(SHAPES), help="of fsdp: qwen3-1.7b on a GPU, qwen3-29m on a CPU")
    parser.add_argument("--ranks", type=int, default=1, help="processes, one a GPU, all at once")
    parser.add_argument("--cycles", type=int, default=10)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--json", type=Path, help="write the JSON lines to this file too")
    parser.add_argument("--plot", type=Path, help="write a picture: svg, png or pdf, by its name")
    chosen = parser.parse_args(words)
    for name, least in (("gib", 0.001), ("small_gib", 0.001), ("ranks", 1), ("rounds", 1)):
        value = getattr(chosen, name)
        if value is not None and not least <= value < 10_000:
            parser.error(f"--{name.replace('_', '-')} {value} is no size to measure with; give {least:g} or more")
    if chosen.gib is not None and (chosen.small_tensors or chosen.case == ["small"]):
        parser.error("--gib is the size of large and flat; of small it is --small-gib")
    if chosen.cycles < 3:
        parser.error(f"--cycles {chosen.cycles} leaves no cycle for the median; give 3 or more")
    chosen.device = chosen.device or ("cuda" if torch.cuda.is_available() else "cpu")
    on_cuda = chosen.device == "cuda"
    chosen.gib = chosen.gib or (12 if on_cuda else 0.5)
    chosen.small_gib = chosen.small_gib or (4 if on_cuda else 0.25)
    chosen.shape = chosen.shape or ("qwen3-1.7b" if on_cuda else "qwen3-29m")
    chosen.case = ["small"] if chosen.small_tensors else chosen.case or default_cases()
    return chosen


def default_cases() -> list[str]:
    """All of them; savers of old move in no pieces."""
    return [*CASES, "swap"] if hasattr(HostArenaSaver, "leave") else list(CASES)


def measure(chosen: argparse.Namespace, folder: Path, tell: Tell) -> None:
    """All figures of all cases, told as soon as an arm is through."""
    context = new_processes(chosen.device)
    if "fsdp" in chosen.case:
        # In a process of its own: this one shall hold no memory of a GPU.
        writer = context.Process(target=write_model, args=(folder, chosen.shape))
        writer.start()
        writer.join()
        if writer.exitcode:
            raise SystemExit(f"no model of shape {chosen.shape} could be written (exit code {writer.exitcode})")
    with onlookers(context, chosen.device, chosen.ranks) as eyes:
        for name in chosen.case:
            size = int((chosen.small_gib if name == "small" else chosen.gib) * GIB)
            case = Case(name=name, size=size, shape=chosen.shape, device=chosen.device)
            if name == "swap":
                tell(run_swaps(context, replace(case, name="large"), chosen.cycles))
            else:
                compare(chosen, context, eyes, (case, str(folder), ""), tell)


def compare(chosen: argparse.Namespace, context: Any, eyes: Sequence[Eye], settings: Settings, tell: Tell) -> None:
    """One case: every arm in turn, as many rounds as were asked for."""
    name = settings[0].name
    rounds: dict[str, list[Round]] = {arm: [] for arm in chosen.arm or arms_on(chosen.device)}
    failed: set[str] = set()
    for number in range(chosen.rounds):
        for arm in rounds:
            print(f"{name}, {arm}, round {number + 1} of {chosen.rounds}", file=sys.stderr)
            came = run_arm(context, eyes, arm, settings, cycles_of(arm, chosen.cycles, chosen.device))
            rounds[arm] += came
            failed |= set() if came else {arm}
            if number + 1 == chosen.rounds:
                tell(figures_of(name, arm, [] if arm in failed else rounds[arm], chosen.device))
    seen = [one for came in rounds.values() for one in came]
    tell(limit_figures(name, seen) if seen else [])


def main(words: Sequence[str]) -> int:
    """1 when an arm of ours failed or lost contents."""
    chosen = parsed(words)
    if chosen.device == "cpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    elif "tms-default" not in arms_on("cuda"):
        print("torch_memory_saver is not installed: its arms are left out", file=sys.stderr)
    lines = Lines(chosen.json)
    with tempfile.TemporaryDirectory(prefix="tidemill-offload-") as folder:
        measure(chosen, Path(folder), lines.tell)
    print(lines.table())
    figures = lines.figures
    if chosen.plot:
        from benchmarks.offload.plot import draw

        draw(figures, chosen.plot)
    return 0 if all(figure.verified for figure in figures if figure.arm == "tidemill") else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
