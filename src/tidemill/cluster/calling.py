"""Calling many workers as one: waiting with a deadline, telling whose failure it was, and leaving none behind."""

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tidemill.contracts.workers import Pending
from tidemill.errors import RankMissingError, WorkerDiedError, WorkerError
from tidemill.units import format_seconds

__all__ = ["GRACE", "gather"]

GRACE = 5.0  # seconds for the others to end once one has failed: they may wait for it in a collective for ever
_MOURNING = 1.0  # the same once one has died: what they did together cannot come to an end any more

Wait = Callable[[Sequence[Pending], float], None]


def gather(
    pending: Sequence[Pending],
    *,
    names: Sequence[str],
    doing: str,
    setting: str,
    deadline: float,
    wait: Wait,
    end_all: Callable[[], None],
) -> list[Any]:
    """Every value, in order. `wait(pending, seconds)` returns when one more is done, or after `seconds`.

    When one fails, the others have GRACE seconds to end too, and one second when it died; `end_all` ends those that do
    not. Raises a worker's death before all else, for the others fail because of it, and then what failed first. Raises
    WorkerError, after `end_all`, when some have not answered by the deadline, or while others gave up waiting for them.
    """
    began = time.monotonic()
    ends = began + deadline
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
                grace = _MOURNING if isinstance(error, WorkerDiedError) else GRACE
                ends = min(ends, time.monotonic() + grace)
                failed[index] = error
    silent = [names[index] for index in range(len(pending)) if index not in values and index not in failed]
    if silent:
        end_all()
    left_waiting = all(isinstance(error, RankMissingError) for error in failed.values())
    if silent and left_waiting:
        seconds = time.monotonic() - began if failed else deadline
        raise _silence(silent, list(failed.values()), doing, setting, seconds)
    if failed:
        cause = _cause(failed, names)
        if silent:
            cause.add_note(f"{', '.join(silent)} waited for it in vain and {_were(silent)} ended")
        raise cause
    return [values[index] for index in range(len(pending))]


def _silence(
    silent: Sequence[str], said: Sequence[BaseException], doing: str, setting: str, seconds: float
) -> WorkerError:
    """`said` is by those who gave up waiting for the silent ones; the first sentence of one is enough."""
    heard = f" ({str(said[0]).partition(';')[0]})" if said else ""
    # Ranks wait for each other by this one, whatever the call was.
    setting = "residency.deadline" if said else setting
    what = "their logs for what they were" if len(silent) > 1 else "its log for what it was"
    error = WorkerError(
        f"{', '.join(silent)} did not {doing} within {format_seconds(seconds)} and {_were(silent)} ended{heard}; "
        f"see {what} doing, or raise {setting} if that is normal here"
    )
    for each in said:
        for note in vars(each).get("__notes__", []):
            error.add_note(note)
    return error


def _were(some: Sequence[str]) -> str:
    return "were" if len(some) > 1 else "was"


def _cause(failed: Mapping[int, BaseException], names: Sequence[str]) -> BaseException:
    """Why all this happened; what the others said of it is added."""
    at = min(failed, key=lambda index: _rank_of(failed[index]))
    cause = failed[at]
    for index, error in failed.items():
        if index != at and str(error) != str(cause):
            cause.add_note(f"{names[index]} then failed too: {error}")
    return cause


def _rank_of(error: BaseException) -> int:
    """How near to the beginning of it all: of equals the first counts, and a mapping is in the order of events."""
    if isinstance(error, WorkerDiedError):
        return 0
    return 2 if isinstance(error, RankMissingError) else 1
