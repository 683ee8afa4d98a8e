"""`tidemill ckpt convert`: weights in a format of pickles, as a safetensors model folder."""

import argparse
import dataclasses
import json

from tidemill.checkpoint.foreign.convert import convert
from tidemill.cli.progress import shown
from tidemill.cli.streams import tell

__all__ = ["main"]


def main(args: argparse.Namespace) -> int:
    """0 when the folder is there. Raises ConfigError and CheckpointError as `convert` does."""
    with shown("converting") as emit:
        made = convert(
            kind=args.kind,
            source=args.source,
            base=args.base,
            target=args.out,
            dtype=args.dtype,
            prefix=args.prefix,
            emit=emit,
        )
    if args.json:
        tell(json.dumps({**dataclasses.asdict(made), "folder": str(made.folder)}))
        return 0
    for notice in made.notices:
        tell(f"note: {notice}")
    under = f", found under {made.prefix!r}" if made.prefix else ""
    tell(f"{made.tensors} tensors of {args.source}{under} converted to {made.folder}")
    return 0
