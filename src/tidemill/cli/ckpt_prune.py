"""`tidemill ckpt prune`: delete checkpoints by a rule, with the code that a run uses, while no run holds the folder."""

import argparse
import json
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from tidemill.checkpoint.lock import RunLock
from tidemill.checkpoint.manifest import Manifest
from tidemill.checkpoint.retention import Retention, RetentionRule, candidates, folder_bytes
from tidemill.cli.ckpt_found import Found, find_run, read_newest
from tidemill.cli.streams import tell
from tidemill.contracts.events import Event, Notice
from tidemill.errors import CheckpointError, ConfigError
from tidemill.recorders.recorded import RecordedNumber
from tidemill.units import format_bytes

__all__ = ["main"]

_NOBODY = 0  # the attempt in the names of what a person deletes


def main(args: argparse.Namespace) -> int:
    """0 when all that had to go is gone, 1 when something could not be deleted. A dry run takes no lock.

    Raises RunLockedError while a run holds the folder, and CheckpointError when no checkpoint is whole: then none goes.
    """
    run = find_run(args.run).given
    with nullcontext() if args.dry_run else RunLock(run):
        found = find_run(args.run)
        newest = read_newest(found, "prune")
        rule = _rule(args, newest.manifest, found)
        number = RecordedNumber(found.numbers, rule.metric)
        told = _planned(run / "checkpoints", rule, number, newest.state.step)
        warnings: list[str] = []
        if not args.dry_run:
            told |= _done(run / "checkpoints", rule, number, newest.state.step, warnings)
    if args.json:
        tell(json.dumps({"run": str(args.run), "dry_run": args.dry_run, **told, "warnings": warnings}))
    else:
        _tell(told, warnings, dry=args.dry_run)
    return 0 if args.dry_run or told["gone"] == told["go"] else 1


def _rule(args: argparse.Namespace, manifest: Manifest, found: Found) -> RetentionRule:
    """What is not said is as the run's settings were at its newest checkpoint."""
    saved = RetentionRule.from_json(manifest.retention)
    named = frozenset(args.keep or ())
    missing = sorted(named - {entry.step for entry in found.chosen})
    if missing:
        steps = ", ".join(str(entry.step) for entry in found.chosen)
        raise ConfigError(f"cannot keep step {missing[0]}: there is no checkpoint of it in {found.given}, only {steps}")
    return RetentionRule(
        keep_last=saved.keep_last if args.keep_last is None else args.keep_last,
        keep_every=saved.keep_every if args.keep_every is None else args.keep_every,
        keep_best=saved.keep_best if args.keep_best is None else args.keep_best,
        named=named,
    )


def _planned(folder: Path, rule: RetentionRule, number: RecordedNumber, newest: int) -> dict[str, Any]:
    held = candidates(folder, newest=newest)
    kept = rule.reasons([entry.step for entry in held], number.values() if rule.metric else {})
    go = [entry for entry in held if entry.step not in kept]
    return {
        "rule": rule.to_json(),
        "kept": [{"step": step, "why": why} for step, why in kept.items()],
        "go": [entry.step for entry in go],
        "bytes": sum(folder_bytes(entry.path) for entry in go),
    }


def _done(
    folder: Path, rule: RetentionRule, number: RecordedNumber, newest: int, warnings: list[str]
) -> dict[str, Any]:
    def emit(event: Event) -> None:
        if isinstance(event, Notice):
            warnings.append(event.text)

    before = folder_bytes(folder)
    try:
        gone = Retention(folder, rule=rule, attempt=_NOBODY, emit=emit, measured=number)(newest)
        return {"gone": gone, "bytes": before - folder_bytes(folder)}
    except OSError as error:
        raise CheckpointError(f"cannot prune {folder}: {error}; make it writable") from error


def _tell(told: dict[str, Any], warnings: list[str], *, dry: bool) -> None:
    for kept in told["kept"]:
        tell(f"step {kept['step']} stays: {kept['why']}")
    for step in told["go"] if dry else told["gone"]:
        tell(f"step {step} {'would go' if dry else 'is deleted'}")
    for text in warnings:
        tell(f"warning: {text}")
    tell(f"{format_bytes(told['bytes'])} {'would be' if dry else 'are'} freed")
