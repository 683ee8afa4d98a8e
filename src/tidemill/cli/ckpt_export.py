"""`tidemill ckpt export`: a checkpoint's model as a folder that transformers loads."""

import argparse
import json
import sys
from pathlib import Path

from tidemill.app.identity import model_identity, tokenizer_identity
from tidemill.checkpoint.export import export_model
from tidemill.checkpoint.stored import StoredCheckpoint, weights_of
from tidemill.cli.ckpt_found import find, of_step, read_newest
from tidemill.cli.progress import shown
from tidemill.cli.streams import say, tell
from tidemill.errors import CheckpointError, ConfigError

__all__ = ["main"]


def main(args: argparse.Namespace) -> int:
    """0 when the folder is there. Raises CheckpointError when no checkpoint that was asked for is whole."""
    stored = read_newest(of_step(find(args.run), args.step), "export")
    base = args.base or _base_of(stored)
    _refuse_among(args.out, stored.path)
    with shown("exporting") as emit:
        target = export_model(weights=weights_of(stored), base=base, target=args.out, dtype=args.dtype, emit=emit)
    if changed := _changed(stored, base):
        text = f"{base} has another {' and '.join(changed)} now than when the run began; the export has what is there"
        say(f"warning: {text}", sys.stderr)
    if args.json:
        tell(json.dumps({"export": str(target), "step": stored.state.step}))
    else:
        tell(f"step {stored.state.step} exported to {target}")
    return 0


def _refuse_among(out: Path, checkpoint: Path) -> None:
    """Raises ConfigError for a place where a run deletes and sets aside."""
    store = checkpoint.parent if checkpoint.parent.name == "checkpoints" else checkpoint
    if out.resolve().is_relative_to(store.resolve()):
        raise ConfigError(
            f"cannot export to {out}: it lies in {store}, where retention deletes, and a start sets aside what is no "
            "checkpoint; choose another folder"
        )


def _changed(stored: StoredCheckpoint, base: Path) -> list[str]:
    """Of what the checkpoint is bound to, what is no longer so in the folder that gives config and tokenizer."""
    saved, now = stored.manifest.identity, {"model": model_identity(base), "tokenizer": tokenizer_identity(base)}
    return [name for name, value in now.items() if saved.get(name, value) != value]


def _base_of(stored: StoredCheckpoint) -> Path:
    try:
        return Path(stored.manifest.settings["settings"]["model"])
    except (KeyError, TypeError):
        raise CheckpointError(
            f"cannot export {stored.path}: its manifest does not say which model folder the run started from"
        ) from None
