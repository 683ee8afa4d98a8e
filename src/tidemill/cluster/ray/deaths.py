"""What Ray says of a worker that is gone, in the words of this project."""

import re
from collections.abc import Sequence

from tidemill.errors import WorkerDiedError

__all__ = ["cause", "death"]

_CODE = re.compile(r"exit(?:ed|s)? (?:with )?(?:exit )?code[: ]*(-?\d+)|exit_code[=: ]+(-?\d+)", re.IGNORECASE)
_HOST_GONE = re.compile(r"node (?:has )?died|node was terminated|node is dead|raylet (?:has )?died", re.IGNORECASE)
_CRASH = re.compile(r"Fatal Python error: (.+)")


def death(name: str, host: str, said: str, log: Sequence[str], path: str) -> WorkerDiedError:
    """An error that names the worker, its host and the cause as far as Ray `said` it, with the end of its log."""
    error = WorkerDiedError(f"{name} on {host} {cause(said, log)}; the run cannot go on without it")
    if log:
        error.add_note("\n".join([f"the last lines of {path}:", *(f"  {line}" for line in log)]))
    error.add_note(f"Ray says: {' '.join(said.split())}")
    return error


def cause(said: str, log: Sequence[str]) -> str:
    """`died (...)`, after Ray's sentence and what the process wrote when it crashed."""
    if "ray.kill" in said:
        return "was ended"
    if "memory monitor" in said or "memory usage threshold" in said or "running low on memory" in said:
        return "was killed by Ray because its host ran out of memory"
    if _HOST_GONE.search(said) or "temporarily unavailable" in said:
        return "died (its host is gone, or Ray on it, or the network to it)"
    if code := _CODE.search(said):
        return f"died (exit code {code.group(1) or code.group(2)})"
    for line in log:
        if crash := _CRASH.search(line):
            return f"crashed ({crash.group(1).lower()})"
    if "End of file" in said or "connection error code" in said:
        return "was killed, or ended its process itself (for want of memory the system kills without a word)"
    return "died"
