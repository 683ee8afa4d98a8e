"""Verbs and their arguments. Only argparse: asking for help imports nothing of what the verbs do."""

import argparse
from collections.abc import Callable
from importlib import metadata
from pathlib import Path

from tidemill.cli.ckpt_arguments import add_ckpt
from tidemill.units import parse_bytes

__all__ = ["parser"]

_EXIT_CODES = """exit codes:
  0 done             1 the run, or what was looked at, failed
  2 wrong settings, files or words        70 a bug: report the traceback
  130 Ctrl-C         143 SIGTERM          141 the output's reader went away
"""

Add = Callable[[argparse.ArgumentParser], None]


def parser() -> argparse.ArgumentParser:
    """The whole command line. `verb` of the result is the module in `tidemill.cli` whose `main` takes it."""
    top = argparse.ArgumentParser(
        prog="tidemill",
        description="RL post-training: trainer and rollout engine take turns on the same GPUs.",
        epilog=_EXIT_CODES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    top.set_defaults(settings=[])
    top.add_argument("--version", action="version", version=f"tidemill {metadata.version('tidemill')}")
    verbs = top.add_subparsers(dest="verb", required=True, metavar="VERB", title="verbs")
    _verb(verbs, "run", "train, or go on from the newest checkpoint", _run)
    _verb(verbs, "check", "show all problems of settings, or each setting with its origin", _settings)
    _verb(verbs, "plan", "show what a run takes of memory, before it starts", _plan)
    _verb(verbs, "rollout", "generate and score answers, without a trainer", _rollout)
    _verb(verbs, "report", "write the page of a run", _report)
    _verb(verbs, "ckpt", "list, verify, compare, prune, export or convert checkpoints", add_ckpt)
    _verb(verbs, "model", "import a model into a checked local folder", _model)
    return top


def _verb(verbs: "argparse._SubParsersAction[argparse.ArgumentParser]", name: str, text: str, add: Add) -> None:
    add(verbs.add_parser(name, help=text, description=text[0].upper() + text[1:] + ".", allow_abbrev=False))


def _json(verb: argparse.ArgumentParser, what: str = "print one JSON object instead of text") -> None:
    verb.add_argument("--json", action="store_true", help=what)


def _settings(verb: argparse.ArgumentParser) -> None:
    verb.add_argument(
        "settings",
        nargs="+",
        metavar="FILE | path=value",
        help="TOML files, then single settings; later wins; see docs/settings.md",
    )
    _json(verb)


def _run(verb: argparse.ArgumentParser) -> None:
    _settings(verb)
    verb.add_argument(
        "--fresh", action="store_true", help="start anew beside what run.dir holds; nothing is overwritten"
    )
    verb.add_argument("--quiet", action="store_true", help="show no progress, only what needs attention")


def _plan(verb: argparse.ArgumentParser) -> None:
    _settings(verb)
    verb.add_argument(
        "--device-memory", type=_size, metavar="SIZE", help="of one GPU, as 80GiB; default: the smallest one here"
    )
    verb.add_argument("--host-memory", type=_size, metavar="SIZE", help="of the host; default: what can be had here")


def _rollout(verb: argparse.ArgumentParser) -> None:
    _settings(verb)
    verb.add_argument("--out", type=Path, required=True, metavar="DIR", help="folder for the scored answers")
    verb.add_argument("--limit", type=_count, default=0, metavar="N", help="first N prompts only; 0 for all (default)")


def _report(verb: argparse.ArgumentParser) -> None:
    verb.add_argument("run", type=Path, metavar="RUN", help="run folder")
    _json(verb)


def _model(verb: argparse.ArgumentParser) -> None:
    actions = verb.add_subparsers(dest="action", required=True, metavar="import")
    bring = actions.add_parser("import", help="import a model", description="Import a GGUF file or a model folder.")
    bring.add_argument("source", metavar="SOURCE", help="GGUF file, or folder in the Hugging Face layout")
    bring.add_argument("--out", type=Path, required=True, metavar="DIR", help="folder to write; it must not exist")
    _json(bring)


def _size(text: str) -> int:
    try:
        count = parse_bytes(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error
    if count == 0:
        raise argparse.ArgumentTypeError(f"{text!r} is no memory at all; write a size above 0, for example 80GiB")
    return count


def _count(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from 0 up")
    return int(text)
