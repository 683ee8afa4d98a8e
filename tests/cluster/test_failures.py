"""tidemill.cluster.failures and tidemill.cluster.worker: what a worker raised, on the driver."""

import errno
import pickle
import platform

import pytest

from tidemill.cluster.failures import raise_failure
from tidemill.cluster.worker import Failure, Worker, failure_of, value_of
from tidemill.contracts.events import Emit, Notice
from tidemill.contracts.workers import Place
from tidemill.errors import DataError, PluginError, RankMissingError, TrainerError, WorkerError
from tidemill.testing.spawned import spawned

HERE = platform.node()


class Thrower:
    """A service that fails as it is told, and says something first."""

    def __init__(self, place: Place, emit: Emit) -> None:
        self.emit = emit

    def throw(self, error: Exception) -> None:
        raise error

    def speak(self, text: str) -> str:
        self.emit(Notice(text=text))
        return text

    def take(self, text: str) -> str:
        return text


def raised(failure: Failure) -> BaseException:
    try:
        raise_failure("trainer-1", pickle.loads(pickle.dumps(failure)))
    except Exception as error:
        return error
    raise AssertionError("nothing was raised")


@pytest.mark.parametrize(
    ("thrown", "kind", "text"),
    [
        (TrainerError("cannot go on"), TrainerError, "cannot go on"),
        (DataError("no such model"), DataError, "no such model"),
        (OSError(errno.ENOSPC, "No space left"), OSError, f"[Errno {errno.ENOSPC}] trainer-1 on {HERE}: No space left"),
        (FileNotFoundError(errno.ENOENT, "no such file", "/a/b"), FileNotFoundError, "no such file: '/a/b'"),
        (OSError("only words"), OSError, "only words"),
        # A mapping of memory that the system refuses, as a sleeping tenant's pages on the host are.
        (OSError(errno.ENOMEM, "Cannot allocate memory"), WorkerError, "ran out of host memory (OSError: [Errno 12] "),
        (LookupError("nobody knows"), WorkerError, "failed: LookupError: nobody knows"),
        (
            ModuleNotFoundError("No module named 'my_lab.parts'"),
            PluginError,
            "has no module 'my_lab.parts': install it",
        ),
    ],
)
def test_every_failure_keeps_its_kind_and_says_worker_and_host_with_the_traceback_beside(
    thrown: Exception, kind: type[Exception], text: str
) -> None:
    group = spawned("trainer", 2, Thrower, meet=False)
    try:
        with pytest.raises(kind) as caught:
            group.start(1, "throw", thrown).result(20)
    finally:
        group.close()
    assert type(caught.value) is kind
    assert f"trainer-1 on {HERE}" in str(caught.value) and text in str(caught.value)
    if isinstance(thrown, OSError) and isinstance(caught.value, OSError):
        assert (caught.value.errno, caught.value.filename) == (thrown.errno, thrown.filename)
    assert caught.value.__notes__[0].startswith(f"in trainer-1 on {HERE}:\nTraceback")


@pytest.mark.parametrize(
    "text",
    [
        "[gloo/transport/tcp/unbound_buffer.cc:81] Timed out waiting 3000ms for recv operation to complete",
        "[gloo/transport/tcp/pair.cc:537] Connection closed by peer [127.0.0.1]:1234",
    ],
)
def test_a_collective_that_gave_up_is_told_as_waiting_in_vain(text: str) -> None:
    assert isinstance(raised(failure_of(RuntimeError(text))), RankMissingError)
    assert not isinstance(raised(failure_of(ConnectionResetError(text))), RankMissingError)


def test_whose_value_was_missing_is_said_by_whoever_should_have_had_it() -> None:
    giver = Worker(name="trainer-0", fault_text="", host="alpha")
    giver.build(Thrower, Place())
    reply = giver.give("throw", TrainerError("no shipment is open"))
    with pytest.raises(
        WorkerError, match=r"what trainer-0 on alpha was to give failed there: TrainerError: no shipment"
    ):
        value_of(reply)


def test_events_of_an_answer_that_another_worker_gets_come_with_the_next_one() -> None:
    giver = Worker(name="trainer-0", fault_text="")
    giver.build(Thrower, Place())
    assert giver.give("speak", "first").events == ()
    assert giver.call("speak", "second").events == (Notice(text="first"), Notice(text="second"))


def test_events_of_passed_on_answers_reach_the_driver() -> None:
    seen: list[object] = []
    group = spawned("trainer", 2, Thrower, meet=False)
    group._emit = seen.append
    try:
        given = group.start(0, "speak", "passed on", passed_on=True)
        assert group.start(1, "take", given).result(20) == "passed on"
        group.call("take", "anything", deadline=20)
    finally:
        group.close()
    assert seen == [Notice(text="passed on")]
