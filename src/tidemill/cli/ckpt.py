"""`tidemill ckpt ls | verify | inspect | diff | prune | export | convert`: look at checkpoints, and use them.

A verb's module is imported when it is called. All but `prune` only read what a run wrote, so that they may be used
while it goes on.
"""

import argparse
import importlib

__all__ = ["main"]

_MODULES = {
    "ls": "ckpt_list",
    "verify": "ckpt_list",
    "inspect": "ckpt_inspect",
    "diff": "ckpt_diff",
    "prune": "ckpt_prune",
    "export": "ckpt_export",
    "convert": "ckpt_convert",
}


def main(args: argparse.Namespace) -> int:
    """Do `args.action`; the exit code. Raises ConfigError for what is not there, CheckpointError for what fails."""
    return int(importlib.import_module(f"tidemill.cli.{_MODULES[args.action]}").main(args))
