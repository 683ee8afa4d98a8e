"""`tidemill ckpt diff`: what differs between two checkpoints; exit code 0 only when nothing does."""

import argparse
import json
import math
from dataclasses import asdict
from typing import Any

from tidemill.checkpoint.difference import Difference, TensorDifference, compared_bytes, difference
from tidemill.checkpoint.stored import StoredCheckpoint
from tidemill.cli.ckpt_found import find, of_step, only_or_newest, read_entry
from tidemill.cli.ckpt_table import lines_of
from tidemill.cli.progress import bar
from tidemill.cli.streams import tell
from tidemill.errors import ConfigError

__all__ = ["main"]

_LONGEST = 160


def main(args: argparse.Namespace) -> int:
    """0 when they hold the same, 1 when not. Raises CheckpointError when one is not whole, ConfigError."""
    first, second = _pair(args)
    with bar("comparing", compared_bytes(first)) as advance:
        found = difference(first, second, advance)
    equal = not found.tensors if args.tensors else found.equal
    if args.json:
        names = {"first": str(first.path), "second": str(second.path), "equal": equal}
        tell(json.dumps(_plain({**names, **asdict(found)})))
    else:
        for line in _lines(first, second, found, tensors_only=args.tensors):
            tell(line)
        tell("equal" if equal else "different")
    return 0 if equal else 1


def _pair(args: argparse.Namespace) -> tuple[StoredCheckpoint, StoredCheckpoint]:
    if args.second is None and args.steps is None:
        raise ConfigError("cannot compare one thing; name a second one, or two steps of the run with --steps N,N")
    steps = args.steps or (None, None)
    if len(steps) != 2:
        raise ConfigError(f"cannot compare {len(steps)} steps; write two: --steps N,N")
    places = (args.first, args.first if args.second is None else args.second)
    chosen = [only_or_newest(of_step(find(place), step)) for place, step in zip(places, steps, strict=True)]
    one, other = (read_entry(entry, "compare") for entry in chosen)
    return one, other


def _plain(value: Any) -> Any:
    """JSON has no infinity: null."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, list | tuple) else value


def _lines(first: StoredCheckpoint, second: StoredCheckpoint, found: Difference, *, tensors_only: bool) -> list[str]:
    lines = [f"first:  {first.path}", f"second: {second.path}"]
    sections = {
        "settings": found.settings,
        "identity": found.identity,
        "state": found.state,
        "beside (does not count)": found.beside,
    }
    for title, texts in sections.items():
        if texts and not tensors_only:
            lines += [f"{title}:", *(f"  {_cut(text)}" for text in texts)]
    lines.append(f"tensors: {found.same_tensors} the same, {len(found.tensors)} not")
    if found.tensors:
        head = ("part", "tensor", "how", "elements", "largest", "mean", "relative")
        lines += lines_of([head, *map(_row, found.tensors)], indent=2)
    return lines


def _row(one: TensorDifference) -> tuple[str, ...]:
    how = f"{one.how} {one.text}".rstrip()
    if one.change is None:
        return one.part, one.name, how, "", "", "", ""
    change = one.change
    numbers = (f"{value:.3g}" for value in (change.largest, change.mean, change.relative))
    return one.part, one.name, how, str(change.elements), *numbers


def _cut(text: str) -> str:
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}..."
