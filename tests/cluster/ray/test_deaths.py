"""tidemill.cluster.ray.deaths: Ray's sentences about a dead worker, in ours. The sentences are those of Ray 2.60."""

import pytest

from tidemill.cluster.ray.deaths import cause, death

KILLED = (
    "The actor died unexpectedly before finishing this task.\n\tclass_name: RayWorker\n\tpid: 26181\nThe actor is dead "
    "because its worker process has died. Worker exit type: SYSTEM_ERROR Worker exit detail: Worker unexpectedly exits "
    "with a connection error code 2. End of file. Some common causes include: (1) the process was killed by the OOM "
    "killer due to high memory usage, (2) ray stop --force was called, or (3) the worker crashed unexpectedly"
)


@pytest.mark.parametrize(
    ("said", "log", "words"),
    [
        (KILLED, [], "was killed, or ended its process itself"),
        (KILLED, ["Fatal Python error: Segmentation fault"], "crashed (segmentation fault)"),
        ("The actor is dead because it was killed by `ray.kill`.", [], "was ended"),
        ("Task was killed due to the node running low on memory.", [], "because its host ran out of memory"),
        ("The actor is dead because its node has died. Node Id: 12", [], "its host is gone"),
        ("The actor 63 is unavailable: The actor is temporarily unavailable: RpcError", [], "the network to it"),
        ("Worker exits with an exit code 7.", [], "died (exit code 7)"),
        ("something new", [], "died"),
    ],
)
def test_a_death_is_told_in_words(said: str, log: list[str], words: str) -> None:
    assert words in cause(said, log)


def test_a_death_names_the_worker_and_its_host_and_shows_the_end_of_its_log() -> None:
    error = death("trainer-1", "alpha (10.0.0.1)", KILLED, ["step 7", "step 8"], "logs/trainer-1.log")
    assert str(error).startswith("trainer-1 on alpha (10.0.0.1) was killed")
    log, ray = error.__notes__
    assert log == "the last lines of logs/trainer-1.log:\n  step 7\n  step 8"
    assert ray.startswith("Ray says: The actor died unexpectedly before finishing this task. class_name")
