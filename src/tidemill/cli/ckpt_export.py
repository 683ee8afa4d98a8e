"""`tidemill ckpt export`: a checkpoint's model as a folder that transformers loads."""

import argparse
import json
from pathlib import Path

from tidemill.checkpoint.export import export_model
from tidemill.checkpoint.stored import StoredCheckpoint, weights_of
from tidemill.cli.ckpt_found import find, of_step, read_newest
from tidemill.cli.progress import shown
from tidemill.cli.streams import tell
from tidemill.errors import CheckpointError

__all__ = ["main"]


def main(args: argparse.Namespace) -> int:
    """0 when the folder is there. Raises CheckpointError when no checkpoint that was asked for is whole."""
    stored = read_newest(of_step(find(args.run), args.step), "export")
    with shown("exporting") as emit:
        target = export_model(
            weights=weights_of(stored), base=_base_of(stored), target=args.out, dtype=args.dtype, emit=emit
        )
    if args.json:
        tell(json.dumps({"export": str(target), "step": stored.state.step}))
    else:
        tell(f"step {stored.state.step} exported to {target}")
    return 0


def _base_of(stored: StoredCheckpoint) -> Path:
    try:
        return Path(stored.manifest.settings["settings"]["model"])
    except (KeyError, TypeError):
        raise CheckpointError(
            f"cannot export {stored.path}: its manifest does not say which model folder the run started from"
        ) from None
