"""What Ray says of a worker that is gone, in the words of this project."""

import re
from collections.abc import Sequence

from tidemill.errors import WorkerDiedError

__all__ = ["death"]

_OUT_OF_MEMORY = re.compile(r"memory on the node|running low on memory|OOM|out[- ]of[- ]memory", re.IGNORECASE)
_CODE = re.compile(r"exit(?:ed)? (?:with )?code[: ]*(-?\d+)|exit_code[=: ]+(-?\d+)", re.IGNORECASE)
_HOST_GONE = re.compile(r"node (?:has )?died|node was terminated|node is dead|raylet (?:has )?died", re.IGNORECASE)
_TOLD_BY_US = re.compile(r"ray\.kill", re.IGNORECASE)


def death(name: str, host: str, said: str, log: Sequence[str], path: str) -> WorkerDiedError:
    """An error that names the worker, its host and the cause as far as Ray `said` it, with the end of its log."""
    error = WorkerDiedError(f"{name} on {host} {cause(said)}; the run cannot go on without it")
    if log:
        error.add_note("\n".join([f"the last lines of {path}:", *(f"  {line}" for line in log)]))
    error.add_note(f"Ray says: {' '.join(said.split())}")
    return error


def cause(said: str) -> str:
    """`died (...)`, after Ray's sentence."""
    if _TOLD_BY_US.search(said):
        return "was ended"
    if "memory monitor" in said or "memory usage threshold" in said or "RAY_memory" in said:
        return "was killed by Ray because its host ran out of memory"
    if _HOST_GONE.search(said):
        return "died (its host is gone, or Ray on it)"
    if code := _CODE.search(said):
        return f"died (exit code {code.group(1) or code.group(2)})"
    if "End of file" in said or "connection error code" in said:
        return "died without a word (killed, by the system for want of memory perhaps, or crashed)"
    return "died"
