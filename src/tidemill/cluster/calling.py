"""Calling many workers as one: waiting with a deadline, telling whose failure it was, and leaving none behind."""

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tidemill.cluster.worker import Failure
from tidemill.contracts.workers import Pending
from tidemill.errors import TidemillError, WorkerDiedError, WorkerError
from tidemill.units import format_seconds

__all__ = ["GRACE", "gather", "raise_failure"]

GRACE = 5.0  # seconds for the others to end once one has failed: they may wait for it in a collective for ever

Wait = Callable[[Sequence[Pending], float], None]


def raise_failure(name: str, failure: Failure) -> None:
    """Raise what worker `name` raised; its traceback goes along as a note."""
    error = failure.error
    if not isinstance(error, TidemillError | OSError):
        memory = _exhausted(failure.text)
        error = WorkerError(_out_of_memory(name, memory, failure.text) if memory else f"{name} failed: {failure.text}")
    error.add_note(f"in {name}:\n{failure.trace.rstrip()}")
    raise error


def _exhausted(text: str) -> str:
    """Which memory ran out, if that is what `text`, the one line of an exception, says."""
    if text.startswith(("OutOfMemoryError", "AcceleratorError: CUDA error: out of memory")):
        return "GPU memory"
    if text.startswith("MemoryError") or "not enough memory: you tried to allocate" in text:
        return "host memory"
    return ""


def _out_of_memory(name: str, memory: str, text: str) -> str:
    if name.startswith("engine"):
        lower = "lower engine.max_batch, data.max_prompt_tokens or rollout.sampling.max_new_tokens"
    else:
        lower = "lower trainer.tokens_per_micro_batch, set trainer.recompute = true, or raise trainer.ranks"
    return f"{name} ran out of {memory} ({text.splitlines()[0]}); {lower}"


def gather(
    pending: Sequence[Pending],
    *,
    names: Sequence[str],
    doing: str,
    deadline: float,
    wait: Wait,
    end_all: Callable[[], None],
) -> list[Any]:
    """Every value, in order. `wait(pending, seconds)` returns when one more is done, or after `seconds`.

    When one fails, the others have GRACE seconds to end too; `end_all` ends those that do not. Raises a worker's death
    before all else, for the others fail because of it, and then what failed first. Raises WorkerError, after `end_all`,
    when some have not answered by the deadline.
    """
    ends = time.monotonic() + deadline
    failed: dict[int, BaseException] = {}
    values: dict[int, Any] = {}
    while len(values) + len(failed) < len(pending):
        open_ = [index for index in range(len(pending)) if index not in values and index not in failed]
        left = ends - time.monotonic()
        if left <= 0:
            break
        wait([pending[index] for index in open_], min(left, 0.5))
        for index in (index for index in open_ if pending[index].done()):
            try:
                values[index] = pending[index].result(0.0)
            except Exception as error:
                if not failed:
                    ends = min(ends, time.monotonic() + GRACE)
                failed[index] = error
    silent = [names[index] for index in range(len(pending)) if index not in values and index not in failed]
    if silent:
        end_all()
    if failed:
        cause = _cause(failed, names)
        if silent:
            cause.add_note(f"{', '.join(silent)} waited for it in vain and was ended")
        raise cause
    if silent:
        raise WorkerError(
            f"{', '.join(silent)} did not answer {doing!r} within {format_seconds(deadline)}, and was ended; see its "
            "log for what it was doing, or raise cluster.deadline if that is normal here"
        )
    return [values[index] for index in range(len(pending))]


def _cause(failed: Mapping[int, BaseException], names: Sequence[str]) -> BaseException:
    """Why all this happened; what the others said of it is added."""
    first = next(iter(failed))
    at = next((index for index, error in failed.items() if isinstance(error, WorkerDiedError)), first)
    cause = failed[at]
    for index, error in failed.items():
        if index != at and str(error) != str(cause):
            cause.add_note(f"{names[index]} then failed too: {error}")
    return cause
