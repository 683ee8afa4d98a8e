"""Words of `tidemill ckpt`. Only argparse, as in `tidemill.cli.arguments`."""

import argparse
from pathlib import Path

__all__ = ["add_ckpt"]

_CHECKPOINT = "run folder, or one checkpoint in it"
_DTYPES = ("auto", "float32", "bfloat16")


def add_ckpt(verb: argparse.ArgumentParser) -> None:
    """Every action with its words; `action` of the result says which."""
    actions = verb.add_subparsers(
        dest="action", required=True, metavar="ls | verify | inspect | diff | prune | export | convert"
    )
    ls = actions.add_parser("ls", help="list checkpoints", description="List the checkpoints of a run.")
    verify = actions.add_parser("verify", help="read them back", description="Read checkpoints back and compare sums.")
    inspect = actions.add_parser("inspect", help="show what is in one", description="Show what is in a checkpoint.")
    export = actions.add_parser("export", help="write a model folder", description="Write a folder for transformers.")
    for action in (ls, verify, inspect, export):
        action.add_argument("run", type=Path, metavar="RUN", help=_CHECKPOINT)
    for action in (verify, inspect, export):
        action.add_argument("--step", type=_step, default=None, metavar="N", help="this checkpoint only")
    inspect.add_argument("--tensors", action="store_true", help="every tensor: dtype, shape, bytes, slices")
    inspect.add_argument(
        "--statistics", action="store_true", help="and its min, max, mean and rms; reads and verifies everything"
    )
    _target(export)
    export.add_argument(
        "--base",
        type=Path,
        default=None,
        metavar="MODEL",
        help="the base model's folder; default: where the run had it",
    )
    diff = _diff(actions)
    prune = _prune(actions)
    convert = _convert(actions)
    for action in (ls, verify, inspect, diff, prune, export, convert):
        action.add_argument("--json", action="store_true", help="print one JSON object instead of text")
        action.allow_abbrev = False


def _target(action: argparse.ArgumentParser) -> None:
    action.add_argument("--out", type=Path, required=True, metavar="DIR", help="folder to write; it must not exist")
    action.add_argument(
        "--dtype", choices=_DTYPES, default="auto", help="precision; auto is that of the base model (default)"
    )


def _diff(actions: "argparse._SubParsersAction[argparse.ArgumentParser]") -> argparse.ArgumentParser:
    diff: argparse.ArgumentParser = actions.add_parser(
        "diff",
        help="compare two",
        description="Compare two checkpoints byte for byte; exit code 0 only when they hold the same.",
    )
    diff.add_argument("first", type=Path, metavar="A", help=f"{_CHECKPOINT}; of a run the newest")
    diff.add_argument("second", type=Path, nargs="?", default=None, metavar="B", help="as A; left out: A again")
    diff.add_argument("--steps", type=_steps, default=None, metavar="N,N", help="the step of A and the step of B")
    diff.add_argument("--tensors", action="store_true", help="compare tensors alone, not settings and state")
    return diff


def _prune(actions: "argparse._SubParsersAction[argparse.ArgumentParser]") -> argparse.ArgumentParser:
    prune: argparse.ArgumentParser = actions.add_parser(
        "prune",
        help="delete old ones",
        description="Delete checkpoints that no rule keeps. What is not said is as the run's settings say. The newest "
        "whole one, and what is not whole, always stays.",
    )
    prune.add_argument("run", type=Path, metavar="RUN", help="run folder, which no run may hold")
    prune.add_argument("--keep-last", type=_at_least_one, default=None, metavar="N", help="the newest so many stay")
    prune.add_argument("--keep-every", type=_step, default=None, metavar="N", help="multiples stay; 0 for none")
    prune.add_argument("--keep-best", default=None, metavar="NAME", help="the best by this number stays; '' for none")
    prune.add_argument("--keep", type=_steps, default=None, metavar="N,N", help="these steps stay, too")
    prune.add_argument("--dry-run", action="store_true", help="only say what would go")
    return prune


def _convert(actions: "argparse._SubParsersAction[argparse.ArgumentParser]") -> argparse.ArgumentParser:
    convert: argparse.ArgumentParser = actions.add_parser(
        "convert",
        help="make a model folder of another format",
        description="Make a safetensors model folder, which a run can start from, of weights in a format of pickles. "
        "They are read by a process of their own that runs nothing of what they name.",
    )
    convert.add_argument("source", type=Path, metavar="SRC", help="folder of the weights")
    convert.add_argument(
        "--from",
        dest="kind",
        choices=("dcp", "hf"),
        required=True,
        help="dcp: torch.distributed.checkpoint; hf: Hugging Face with pytorch_model*.bin",
    )
    convert.add_argument(
        "--base",
        type=Path,
        default=None,
        metavar="MODEL",
        help="model folder with config and tokenizer; hf: SRC itself",
    )
    convert.add_argument(
        "--prefix", default=None, metavar="TEXT", help="what stands before the model's names; default: found out"
    )
    _target(convert)
    return convert


def _step(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from 0 up")
    return int(text)


def _at_least_one(text: str) -> int:
    count = _step(text)
    if count == 0:
        raise argparse.ArgumentTypeError("at least one is always kept; write 1 or more")
    return count


def _steps(text: str) -> tuple[int, ...]:
    return tuple(_step(word.strip()) for word in text.split(","))
