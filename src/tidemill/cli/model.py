"""`tidemill model import SOURCE --out DIR`: a GGUF file or a Hugging Face folder into a checked local folder."""

import argparse
import dataclasses
import json
import sys
import time
from pathlib import Path

from tidemill.cli.streams import say, tell
from tidemill.units import format_bytes, format_seconds

__all__ = ["main"]


def main(args: argparse.Namespace) -> int:
    """Exit code 0 when the folder is there and checked. Raises DataError or PluginError."""
    source = Path(args.source).expanduser()
    say(f"reading {source} ...", sys.stderr)
    began = time.perf_counter()
    # Loads torch: only once this verb is called, and after the line above.
    from tidemill.app.model_import import import_model

    model = import_model(source, Path(args.out).expanduser())
    seconds = time.perf_counter() - began
    if args.json:
        tell(json.dumps({**dataclasses.asdict(model), "folder": str(model.folder), "seconds": round(seconds, 3)}))
        return 0
    for notice in model.notices:
        tell(f"note: {notice}")
    tell(
        f"{model.folder}: {model.architecture}, {model.parameters / 1e6:.1f}M parameters, {model.dtype}, "
        f"{'tied' if model.tied else 'untied'} embeddings, {'a' if model.chat_template else 'no'} chat template, "
        f"{format_bytes(model.bytes)}; loaded and checked in {format_seconds(seconds)}"
    )
    return 0
