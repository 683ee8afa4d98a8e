"""`tidemill ckpt ls` and `verify`: which checkpoints there are, whether they hold, and why each is kept."""

import argparse
import json
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

from tidemill.checkpoint.catalog import Entry, problems_of
from tidemill.checkpoint.manifest import MANIFEST, Manifest
from tidemill.checkpoint.retention import RetentionRule
from tidemill.cli.ckpt_found import Found, find, of_step, tensor_bytes
from tidemill.cli.ckpt_table import lines_of
from tidemill.cli.progress import bar
from tidemill.cli.streams import tell
from tidemill.errors import CheckpointError
from tidemill.recorders.recorded import RecordedNumber
from tidemill.units import format_bytes, format_seconds

__all__ = ["main"]


@dataclass(frozen=True, kw_only=True)
class _Row:
    """One checkpoint as it is shown. `age` is in seconds, for people; `problem` is empty when it is verified."""

    step: int
    path: str
    age: float
    bytes: int
    complete: bool
    verified: bool
    kept: str
    problem: str


def main(args: argparse.Namespace) -> int:
    """`ls` is 0 whatever it shows; `verify` only when everything that was asked for holds."""
    return _list(args) if args.action == "ls" else _verify(args)


def _list(args: argparse.Namespace) -> int:
    rows = _rows(find(args.run))
    if args.json:
        tell(json.dumps({"run": str(args.run), "checkpoints": [asdict(row) for row in rows]}))
        return 0
    table = [("step", "age", "size", "complete", "verified", "why kept")]
    table += [
        (
            str(row.step),
            format_seconds(row.age) if row.complete else "-",
            format_bytes(row.bytes),
            _yes(row.complete),
            _yes(row.verified),
            row.kept,
        )
        for row in rows
    ]
    for line in lines_of(table):
        tell(line)
    for row in rows:
        if row.problem:
            tell(f"{Path(row.path).name}: {row.problem}")
    return 0


def _verify(args: argparse.Namespace) -> int:
    rows = _rows(of_step(find(args.run), args.step))
    holds = all(row.verified for row in rows)
    if args.json:
        tell(json.dumps({"holds": holds, "checkpoints": [asdict(row) for row in rows]}))
    else:
        for row in rows:
            tell(f"{Path(row.path).name}: {'holds' if row.verified else row.problem}")
    return 0 if holds else 1


def _rows(found: Found) -> list[_Row]:
    """Of several that were named, those that a run deletes meanwhile are left out: nothing is wrong with them."""
    kept = _kept(found)
    rows = []
    with bar("verifying", tensor_bytes(found.chosen)) as advance:
        for entry in found.chosen:
            manifest = _manifest(entry)
            problem = _problem(entry, advance)
            if problem and not entry.path.is_dir():
                if len(found.chosen) > 1:
                    continue
                problem = "it was deleted meanwhile"
            rows.append(
                _Row(
                    step=entry.step,
                    path=str(entry.path),
                    age=max(0.0, time.time() - manifest.time) if manifest else 0.0,
                    bytes=manifest.total_bytes if manifest else 0,
                    complete=entry.complete,
                    verified=not problem,
                    kept=_why(entry, found, kept),
                    problem=problem,
                )
            )
    return rows


def _why(entry: Entry, found: Found, kept: dict[int, str]) -> str:
    if entry not in found.siblings:
        return "in no run's care: never deleted"
    if not entry.complete:
        return "not whole: never deleted"
    if entry.path.is_symlink():
        return "a link: never deleted"
    return kept.get(entry.step, "goes at the next save")


def _kept(found: Found) -> dict[int, str]:
    """By the rule of the newest manifest that can be read."""
    for entry in reversed(found.siblings):
        manifest = _manifest(entry)
        if manifest is None:
            continue
        rule = RetentionRule.from_json(manifest.retention)
        steps = [entry.step for entry in found.siblings if entry.complete and not entry.path.is_symlink()]
        return rule.reasons(steps, RecordedNumber(found.numbers, rule.metric).values() if rule.metric else {})
    return {}


def _manifest(entry: Entry) -> Manifest | None:
    try:
        return Manifest.read(entry.path / MANIFEST)
    except (CheckpointError, OSError):
        return None  # `_problem` says why


def _problem(entry: Entry, advance: Callable[[int], None]) -> str:
    try:
        return problems_of(entry, advance=advance)[1]
    except CheckpointError as error:
        return str(error)


def _yes(value: bool) -> str:
    return "yes" if value else "no"
