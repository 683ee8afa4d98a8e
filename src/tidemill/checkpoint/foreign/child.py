"""The process that reads pickles, so that whatever a damaged or a hostile one does, it does not do it to a run.

Started as `python -m tidemill.checkpoint.foreign.child`: one request as JSON on standard input, one reply on standard
output. Before it reads anything it gives up writing bytes to files, and more processes, memory and time than a table of
tensors takes; and its reader has no way to call what a pickle names. Loads the standard library alone.
"""

import json
import resource
import sys
from pathlib import Path
from typing import Any

from tidemill.checkpoint.foreign.archive import archived_tensors
from tidemill.checkpoint.foreign.metadata import listed_tensors
from tidemill.checkpoint.foreign.unpickler import ForbiddenError

__all__ = ["main"]

_MEMORY = 4 << 30
_SECONDS = 600


def main() -> None:
    """Reply `{"result": ...}`, or `{"refused": why}`."""
    _give_up()
    try:
        reply: dict[str, Any] = {"result": _answered(json.loads(sys.stdin.buffer.read()))}
    except ForbiddenError as error:
        reply = {"refused": str(error)[:500]}
    except (MemoryError, RecursionError) as error:
        reply = {"refused": f"more than a table of tensors can be ({type(error).__name__})"}
    except OSError as error:
        reply = {"unreadable": f"{error.strerror or error}"}
    sys.stdout.write(json.dumps(reply))
    sys.stdout.flush()


def _give_up() -> None:
    limits = {
        resource.RLIMIT_FSIZE: 0,
        resource.RLIMIT_NPROC: 0,
        resource.RLIMIT_CORE: 0,
        resource.RLIMIT_AS: _MEMORY,
        resource.RLIMIT_CPU: _SECONDS,
    }
    for kind, limit in limits.items():
        _, hard = resource.getrlimit(kind)
        limit = limit if hard == resource.RLIM_INFINITY else min(limit, hard)
        resource.setrlimit(kind, (limit, limit))


def _answered(request: dict[str, Any]) -> Any:
    if "metadata" in request:
        return listed_tensors(Path(request["metadata"]).read_bytes())
    found = []
    for path, begin, length in request["archives"]:
        with Path(path).open("rb") as file:
            try:
                found.append(archived_tensors(file, begin, length))
            except ForbiddenError as error:
                raise ForbiddenError(f"{error} (in {Path(path).name}, at byte {begin})") from None
    return found


if __name__ == "__main__":
    main()
