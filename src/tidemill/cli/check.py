"""`tidemill check`: all problems of a run's settings, or every effective setting with where it came from."""

import argparse
import json
import sys

from tidemill.cli.streams import say, tell
from tidemill.config.explain import effective
from tidemill.config.load import SettingsError, load

__all__ = ["main"]


def main(arguments: argparse.Namespace) -> int:
    """0 when the settings make a run, 2 when not. Looks at the files that they name, starts nothing."""
    try:
        loaded = load(arguments.files, arguments.words)
    except SettingsError as error:
        if not arguments.json:
            raise
        problems = [problem.to_json() for problem in error.problems]
        tell(json.dumps({"ok": False, "problems": problems}, indent=1))
        return error.exit_code
    if arguments.json:
        tell(json.dumps({"ok": True, **loaded.to_json()}, indent=1))
        return 0
    tell(effective(loaded))
    say(
        "these settings are good; `tidemill run` with the same words reads model, data and reward, and starts the run",
        sys.stderr,
    )
    return 0
