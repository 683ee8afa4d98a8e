"""The command `tidemill`: words in, exit code out. A verb's module is imported only when that verb is called."""

import argparse
import contextlib
import importlib
import io
import sys
import traceback
from collections.abc import Iterator, Sequence
from pathlib import Path

from tidemill.cli.arguments import parser
from tidemill.cli.streams import say, settle, silence, writing
from tidemill.errors import Interrupted, TidemillError

__all__ = ["main", "parsed"]

_INTERRUPTED = 130
_READER_GONE = 141
_BUG = 70


def main(argv: Sequence[str] | None = None) -> int:
    """Run one verb and return the exit code. Raises SystemExit, as argparse does, for `--help` and wrong words."""
    for stream in (sys.stdout, sys.stderr):
        # A file name may hold bytes that no encoding can show; showing it must not be what fails.
        with contextlib.suppress(OSError, ValueError):
            if isinstance(stream, io.TextIOWrapper):
                stream.reconfigure(errors="backslashreplace")
    arguments = parsed(sys.argv[1:] if argv is None else list(argv))
    try:
        return _ended(arguments)
    finally:
        settle(sys.stderr)


def _ended(arguments: argparse.Namespace) -> int:
    try:
        code = int(importlib.import_module(f"tidemill.cli.{arguments.verb}").main(arguments))
        if sys.stdout is not None:
            with writing(sys.stdout):
                sys.stdout.flush()
        return code
    except (TidemillError, Interrupted) as error:
        say("\n  ".join([f"tidemill: {error}", *_notes(error)]), sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        say("tidemill: interrupted", sys.stderr)
        return _INTERRUPTED
    except BrokenPipeError:
        silence(sys.stdout)
        return _READER_GONE
    except Exception:
        say(traceback.format_exc().rstrip("\n"), sys.stderr)
        return _BUG


def _notes(error: BaseException | None) -> Iterator[str]:
    """What went wrong besides, such as a summary that could not be written after it, and a worker's traceback."""
    while error is not None:
        yield from vars(error).get("__notes__", [])
        error = error.__cause__


def parsed(argv: list[str]) -> argparse.Namespace:
    """Arguments, with settings split into `files` and `words`, wherever the options stand between them."""
    top = parser()
    if not argv:
        top.print_help(sys.stderr)
        raise SystemExit(2)
    arguments, rest = top.parse_known_args(argv)
    named = list(arguments.settings)
    unknown = [word for word in rest if not named or word.startswith("-")]
    if unknown:
        hint = "; settings are written path=value" if arguments.verb in ("run", "check", "plan", "rollout") else ""
        top.error(f"{arguments.verb} does not know {' '.join(unknown)}{hint}")
    named += rest
    arguments.files = [Path(word) for word in named if _is_file(word)]
    arguments.words = [word for word in named if not _is_file(word)]
    return arguments


def _is_file(word: str) -> bool:
    """A word without `=` names a file, and so does one that is a file."""
    with contextlib.suppress(OSError, ValueError):
        return "=" not in word or Path(word).is_file()
    return False


if __name__ == "__main__":
    sys.exit(main())
