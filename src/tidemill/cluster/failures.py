"""What a worker raised, raised again on the driver: with the worker's name, its host, and its traceback as a note."""

import errno
import re

from tidemill.cluster.worker import Failure
from tidemill.errors import PluginError, RankMissingError, TidemillError, WorkerError

__all__ = ["missing_module", "no_module", "raise_failure"]

_NO_MODULE = re.compile(r"ModuleNotFoundError: No module named '([^']+)'")
# How gloo and NCCL say that another rank did not take part in a collective. Source: their own messages, torch 2.13.
_LEFT_WAITING = re.compile(
    r"^(?:RuntimeError|Dist\w*Error): .*(?:Timed out waiting|timeout caused pair closure|Connection closed by peer|"
    r"Connection reset by peer|collective operation timeout)",
    re.DOTALL,
)


def raise_failure(name: str, failure: Failure) -> None:
    """Raise what worker `name` raised. Our own errors, and the system's with their number, keep their types."""
    where = failure.where or name
    error = _error(where, failure)
    error.add_note(f"in {where}:\n{failure.trace.rstrip()}")
    raise error


def _error(where: str, failure: Failure) -> BaseException:
    error, text = failure.error, failure.text
    if isinstance(error, TidemillError):
        return type(error)(f"{where}: {error}")
    if _LEFT_WAITING.search(text):
        return RankMissingError(f"{where} waited for other ranks in vain ({text.splitlines()[0]}); see their logs")
    if isinstance(error, OSError) and error.errno != errno.ENOMEM:
        return _of_system(where, error)
    if module := missing_module(text):
        return no_module(where, module)
    if memory := _exhausted(text):
        return WorkerError(_out_of_memory(where, memory, text))
    return WorkerError(f"{where} failed: {text}")


def _of_system(where: str, error: OSError) -> OSError:
    if error.errno is None:
        return type(error)(f"{where}: {error}")
    names = () if error.filename is None else (error.filename,)
    return type(error)(error.errno, f"{where}: {error.strerror}", *names)


def missing_module(text: str) -> str:
    """The module that was not found, if that is what an exception says."""
    found = _NO_MODULE.search(text)
    return found.group(1) if found else ""


def no_module(where: str, module: str) -> PluginError:
    """An error for a worker whose host lacks what the driver's has."""
    return PluginError(
        f"{where} has no module {module!r}: install it on that host too, or put the folder that holds it on PYTHONPATH "
        "there"
    )


def _exhausted(text: str) -> str:
    """Which memory ran out, if that is what `text`, the one line of an exception, says."""
    if text.startswith(("OutOfMemoryError", "AcceleratorError: CUDA error: out of memory")):
        return "GPU memory"
    if (
        text.startswith(("MemoryError", f"OSError: [Errno {errno.ENOMEM}]"))
        or "not enough memory: you tried to allocate" in text
    ):
        return "host memory"
    return ""


def _out_of_memory(where: str, memory: str, text: str) -> str:
    if where.startswith("engine"):
        lower = "lower engine.max_batch, data.max_prompt_tokens or rollout.sampling.max_new_tokens"
    else:
        lower = "lower trainer.tokens_per_micro_batch, set trainer.recompute = true, or raise trainer.ranks"
    return f"{where} ran out of {memory} ({text.splitlines()[0]}); {lower}"
