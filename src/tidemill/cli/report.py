"""`tidemill report RUN`: make the run page."""

import argparse
import json
from pathlib import Path

from tidemill.cli.streams import tell
from tidemill.errors import ConfigError
from tidemill.recorders.report import write_report

__all__ = ["main"]


def main(args: argparse.Namespace) -> int:
    """Write the page of `args.run` and print where it is. Raises ConfigError when there is no such folder."""
    run = Path(args.run)
    if not run.is_dir():
        raise ConfigError(f"cannot make the run page of {run}: there is no such folder; name a run's folder (run.dir)")
    try:
        path = write_report(run)
    except OSError as error:
        raise ConfigError(
            f"cannot write the run page into {run}: {error.strerror or error}; make it writable"
        ) from error
    if args.json:
        tell(json.dumps({"report": str(path), "bytes": path.stat().st_size}))
    else:
        tell(str(path))
    return 0
