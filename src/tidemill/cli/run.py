"""`tidemill run`: train, or go on from the newest checkpoint."""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from tidemill.cli.streams import say
from tidemill.config.load import load

__all__ = ["main"]


def main(args: argparse.Namespace) -> int:
    """Run to the end and say where everything is."""
    loaded = load(args.files, args.words)
    # torch and transformers come with it: not before the settings are known to be right.
    from tidemill.app.run import run

    quiet = args.quiet or args.json
    summary = run(loaded, fresh=args.fresh, quiet=quiet, command=["tidemill", *sys.argv[1:]])
    if args.json:
        say(json.dumps(summary), sys.stdout)
    elif not args.quiet:
        say(_farewell(summary, loaded.config.run.dir), sys.stdout)
    return 0


def _farewell(summary: dict[str, Any], folder: Path) -> str:
    first = f"nothing to do: {folder} has finished {summary['steps']} steps; raise `steps` to go on, or use --fresh"
    lines = [first] if summary["already_finished"] else [_result(summary)]
    lines += [
        f"  curves and samples   {folder / 'report.html'}",
        f"  figures              {folder / 'summary.json'}",
        f"  checkpoints          {folder / 'checkpoints'}",
    ]
    if summary["export"]:
        lines += [
            f"  model                {summary['export']}",
            "  load it with         AutoModelForCausalLM.from_pretrained(" + repr(summary["export"]) + ")",
        ]
    return "\n".join(lines)


def _result(summary: dict[str, Any]) -> str:
    parts = [f"finished {summary['steps']} steps in {summary['seconds']:.0f} s"]
    if summary["eval_first"] is not None:
        parts.append(f"evaluation {summary['eval_first']:.2f} -> {summary['eval_last']:.2f}")
    if summary["reward_first"] is not None:
        parts.append(f"reward {summary['reward_first']:.2f} -> {summary['reward_last']:.2f}")
    parts.append(f"{summary['checkpoints']} checkpoints, {summary['sleeps']} sleeps of the trainer")
    return ", ".join(parts)
