"""Workers on a private cluster, called as one.

tidemill.cluster.ray.group, tidemill.cluster.ray.actor, tidemill.cluster.ray.actors, tidemill.cluster.ray.waiting,
tidemill.cluster.ray.connection.
"""

import importlib
import os
import re
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import FrameType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
from ray.exceptions import OutOfDiskError, RaySystemError
from tests.cluster.ray.conftest import Make

from tidemill import faults
from tidemill.cluster import calling
from tidemill.cluster.ray.group import Member, RayGroup, end
from tidemill.cluster.ray.private import PrivateCluster
from tidemill.contracts.events import Event, Metrics, Notice, ignore
from tidemill.contracts.workers import WorkerGroup
from tidemill.errors import Interrupted, PluginError, TrainerError, WorkerDiedError, WorkerError

seen: list[Event] = []


@pytest.fixture(scope="module")
def group(make_group: Make) -> Iterator[RayGroup]:
    """Two workers, for tests that leave them alive."""
    with make_group("trainer", 2, seen.append) as made:
        yield made


@pytest.fixture(scope="module")
def victims(make_group: Make) -> Iterator[RayGroup]:
    """Workers of which each test kills one of its own."""
    with faults.armed("victim-2/add=kill@2"), make_group("victim", 3, lambda event: None, threads=1) as made:
        yield made


def test_workers_answer_in_order_and_know_their_place(group: RayGroup) -> None:
    checked: WorkerGroup = group
    assert checked.names == ("trainer-0", "trainer-1")
    assert group.call("where", deadline=10) == [(0, 2, "cpu"), (1, 2, "cpu")]
    assert group.call_each("add", [(1, 2), (3, 4)], deadline=10) == [3, 7]
    (meeting,) = set(group.call("rendezvous", deadline=10))
    assert meeting.startswith("127.0.0.1:")


def test_calls_run_in_one_thread_that_has_its_share_of_the_cores(group: RayGroup) -> None:
    share = max(1, len(os.sched_getaffinity(0)) // 2)
    for _ in range(3):
        for (ident, threads, environment), again in zip(
            group.call("thread", deadline=10), group.call("thread", deadline=10), strict=True
        ):
            assert again == (ident, threads, environment)
            assert (threads, environment) == (share, str(share))


def test_a_worker_sees_no_gpu_and_meets_others_on_this_machine_only(group: RayGroup) -> None:
    assert group.call("environment", "CUDA_VISIBLE_DEVICES", deadline=10) == ["", ""]
    for name, interface in (("GLOO_SOCKET_IFNAME", "lo"), ("NCCL_SOCKET_IFNAME", "=lo")):
        assert set(group.call("environment", name, deadline=10)) == {os.environ.get(name, interface)}
    assert {each.partition(":")[0] for each in group.call("rendezvous", deadline=10)} == {"127.0.0.1"}


def test_workers_begin_with_the_runs_seed(group: RayGroup) -> None:
    one, other = group.call("draw", deadline=10)
    assert one == other
    assert group.call("draw", deadline=10)[0] != one
    np.random.seed(7)
    assert one[0] == np.random.random()


def test_events_of_the_first_worker_and_warnings_of_all_are_handed_on(group: RayGroup) -> None:
    seen.clear()
    group.call("emits", deadline=10)
    others = Notice(text="trainer-1: beware 1", level="warning")
    assert others in seen
    assert [event for event in seen if event != others] == [
        Metrics(values={"rank": 0}),
        Notice(text="hint 0"),
        Notice(text="beware 0", level="warning"),
    ]


def test_a_large_value_is_read_where_it_lies(group: RayGroup) -> None:
    (value, other) = group.call("zeros", 1, deadline=10)
    assert len(value) == len(other) == 1 << 20
    assert not value.flags.writeable and not value.flags.owndata


def test_a_pending_answer_goes_from_worker_to_worker(group: RayGroup) -> None:
    three = group.start(0, "add", 1, 2)
    assert group.start(1, "add", three, 4).result(10) == 7
    shared = group.start(1, "look_at", group.start(0, "zeros", 1)).result(10)
    assert shared == (1 << 20, False, False)


def test_objects_larger_than_the_store_go_through_the_disk(group: RayGroup, private: PrivateCluster) -> None:
    pending = [group.start(0, "zeros", 100) for _ in range(3)]
    assert [len(each.result(60)) for each in pending] == [100 << 20] * 3
    assert group.start(1, "look_at", np.ones(100 << 20, np.uint8)).result(60)[0] == 100 << 20


def test_control_is_answered_beside_a_call(group: RayGroup) -> None:
    slow = group.start(0, "wait", 1.5)
    began = time.monotonic()
    assert group.control(0, "add", 1, 1, deadline=10) == 2
    assert time.monotonic() - began < 1.4
    assert not slow.done()
    assert slow.result(10) == "done"


def test_an_unexpected_exception_becomes_a_worker_error_with_its_traceback(group: RayGroup) -> None:
    with pytest.raises(WorkerError, match="trainer-0 on .* failed: LookupError: nobody expects it") as caught:
        group.call("surprise", deadline=10)
    assert "in surprise" in caught.value.__notes__[0]
    pending = group.start(1, "add", group.start(0, "surprise"), 1)
    with pytest.raises(WorkerError, match="nobody expects it"):
        pending.result(10)


def test_a_rank_out_of_memory_is_named_with_what_to_lower(group: RayGroup) -> None:
    with pytest.raises(
        WorkerError, match=r"trainer-1 on .* ran out of GPU memory \(OutOfMemoryError: .*; lower trainer"
    ):
        group.start(1, "run_out", "gpu").result(10)
    with pytest.raises(WorkerError, match="trainer-0 on .* ran out of host memory"):
        group.start(0, "run_out", "host").result(10)


def test_a_value_that_cannot_be_sent_is_an_error_and_the_worker_lives(group: RayGroup) -> None:
    with pytest.raises(WorkerError, match=r"trainer-0 on .* could not answer: TypeError: cannot pickle"):
        group.start(0, "unsendable").result(10)
    assert group.start(0, "add", 1, 1).result(10) == 2


def test_a_worker_that_does_not_answer_in_time_is_named(group: RayGroup) -> None:
    pending = group.start(1, "wait", 1.0)
    with pytest.raises(WorkerError, match=r"trainer-1 on .* did not answer 'wait' within 300 ms; see .*trainer-1.log"):
        pending.result(0.3)
    assert pending.result(10) == "done"


def test_what_workers_print_is_in_their_logs(group: RayGroup) -> None:
    group.call("say", "from python", "ünïcode", deadline=10)
    group.start(1, "say_on_stderr", "and half a line").result(10)
    group.start(1, "say_from_c", " from c").result(10)
    assert group.members[0].log.read_text() == "from python\nünïcode\n"
    assert group.members[1].log.read_text() == "from python\nünïcode\nand half a line from c\n"


def test_a_signal_comes_through_while_the_driver_waits(group: RayGroup) -> None:
    def stop(number: int, frame: FrameType | None) -> None:
        raise Interrupted("stopped")

    before = signal.signal(signal.SIGUSR1, stop)
    try:
        threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGUSR1)).start()
        began = time.monotonic()
        with pytest.raises(Interrupted):
            group.call("wait", 3.0, deadline=60)
        assert time.monotonic() - began < 1.5
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert group.call("add", 1, 1, deadline=20) == [2, 2]


def test_calling_two_workers_costs_milliseconds(group: RayGroup) -> None:
    costs = []
    for _ in range(50):
        began = time.perf_counter()
        group.call("add", 1, 1, deadline=10)
        costs.append(time.perf_counter() - began)
    assert sorted(costs)[25] < 0.05


def test_ray_leaves_signals_to_the_driver(private: PrivateCluster) -> None:
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
    assert signal.getsignal(signal.SIGINT) == signal.default_int_handler


def died(pending: Any) -> tuple[str, list[str], float]:
    began = time.monotonic()
    with pytest.raises(WorkerDiedError) as caught:
        pending.result(60)
    return str(caught.value), caught.value.__notes__, time.monotonic() - began


def test_a_killed_worker_is_reported_in_seconds_with_the_end_of_its_log(victims: RayGroup, group: RayGroup) -> None:
    victims.start(0, "say", "the last thing it did").result(20)
    pending = victims.start(0, "wait", 60.0)
    reader = group.start(1, "add", victims.start(0, "add", 1, 1), 1)
    time.sleep(0.3)
    os.kill(victims.members[0].pid, signal.SIGKILL)
    message, notes, seconds = died(pending)
    assert message.startswith("victim-0 on ") and "was killed" in message
    assert "the last thing it did" in notes[0]
    assert seconds < 10
    assert "victim-0" in died(victims.start(0, "add", 1, 1))[0]
    with pytest.raises(
        WorkerError, match="trainer-1 on .* could not answer: the worker that was to give it a value died"
    ):
        reader.result(20)
    assert group.start(1, "add", 1, 1).result(20) == 2


def test_a_crash_is_told_with_its_stack(victims: RayGroup) -> None:
    message, notes, _ = died(victims.start(1, "crash"))
    assert "victim-1" in message and "crashed (segmentation fault)" in message
    assert "in crash" in notes[0]


def test_a_fault_point_counts_in_the_worker_that_it_names(victims: RayGroup) -> None:
    assert victims.start(2, "add", 1, 1).result(20) == 2
    assert "victim-2" in died(victims.start(2, "add", 1, 1))[0]


def test_logs_lie_where_they_were_asked_for(make_group: Make, tmp_path: Path) -> None:
    with make_group("engine", 1, lambda event: None, folder=tmp_path / "deep" / "logs") as made:
        made.start(0, "say", "hello").result(20)
    assert sorted(path.name for path in (tmp_path / "deep" / "logs").iterdir()) == ["engine-0.log"]
    with pytest.raises(WorkerError, match="engine-0 was ended"):
        made.start(0, "add", 1, 1)


def test_what_ray_cannot_take_in_is_told_with_what_to_free(tmp_path: Path) -> None:
    def full(*arguments: Any) -> None:
        raise OutOfDiskError("Local disk is full")

    actor: Any = SimpleNamespace(call=SimpleNamespace(remote=full))
    member = Member(name="trainer-0", host="alpha", node="", pid=0, actor=actor, log=tmp_path / "log")
    group = RayGroup([member], emit=ignore, check=lambda: None, renew=lambda worker: member)
    with pytest.raises(
        WorkerError, match=r"trainer-0 on alpha cannot be asked to answer 'add': OutOfDiskError(.|\n)*free memory"
    ):
        group.call("add", 1, 1, deadline=10)


def test_what_ray_refuses_for_other_reasons_comes_without_advice_about_room(tmp_path: Path) -> None:
    def refuse(*arguments: Any) -> None:
        raise RaySystemError("the raylet is not there")

    actor: Any = SimpleNamespace(call=SimpleNamespace(remote=refuse), control=SimpleNamespace(remote=refuse))
    member = Member(name="trainer-0", host="alpha", node="", pid=0, actor=actor, log=tmp_path / "log")
    group = RayGroup([member], emit=ignore, check=lambda: None, renew=lambda worker: member)
    with pytest.raises(WorkerError, match="trainer-0 on alpha died") as caught:
        group.call("add", 1, 1, deadline=10)
    assert "free memory" not in str(caught.value)
    assert "the raylet is not there" in "\n".join(caught.value.__notes__)
    group.notify(0, "add", 1, 1)


def test_ending_what_is_no_more_raises_nothing_over_the_error_before() -> None:
    nobody: Any = SimpleNamespace()
    end(nobody)


def test_modules_are_found_where_the_driver_finds_them_and_those_of_its_host_alone_are_named(
    make_group: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for folder in ("sent", "kept"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / f"lab_{folder}.py").write_text("class Number(int):\n    pass\n")
    monkeypatch.syspath_prepend(tmp_path / "sent")
    with make_group("finder", 1, ignore) as made:
        assert made.call("add", importlib.import_module("lab_sent").Number(2), 3, deadline=20) == [5]
        monkeypatch.syspath_prepend(tmp_path / "kept")
        with pytest.raises(PluginError, match="finder-0 on .* has no module 'lab_kept': install it on that host too"):
            made.call("add", importlib.import_module("lab_kept").Number(2), 3, deadline=20)
        assert made.call("add", 2, 3, deadline=20) == [5]


def test_the_first_failure_is_raised_and_the_others_are_ended(group: RayGroup, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calling, "GRACE", 0.3)
    with pytest.raises(TrainerError, match=r"trainer-1 on .*: cannot go on: rank 1") as caught:
        group.call("fail_on", 1, deadline=60)
    notes = "\n".join(caught.value.__notes__)
    assert "in trainer-1" in notes
    assert re.search("trainer-0 on .* waited for it in vain and was ended", notes)
    with pytest.raises(WorkerError, match="trainer-0 was ended"):
        group.call("add", 1, 1, deadline=20)


def test_a_worker_that_was_killed_is_started_again_in_its_place(make_group: Make, tmp_path: Path) -> None:
    with make_group("engine", 2, lambda event: None, folder=tmp_path / "logs") as made:
        first = made.members
        os.kill(first[1].pid, signal.SIGKILL)
        with pytest.raises(WorkerDiedError):
            made.call("add", 1, 1, deadline=20)
        made.restart(1, deadline=60)
        assert made.call("add", 1, 1, deadline=20) == [2, 2]
        assert made.members[0] is first[0]
        assert (made.members[1].name, made.members[1].log) == ("engine-1", first[1].log)
        assert made.members[1].pid != first[1].pid
        # One that is well is ended first.
        made.restart(0, deadline=60)
        assert made.call("add", 2, 2, deadline=20) == [4, 4]
