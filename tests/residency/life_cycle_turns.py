"""Files of one checkpoint are written by several threads at once; here one after the other, so that a test that fails
once fails always."""

import threading

__all__ = ["in_turn"]

_JOB = "together-"


def in_turn(operation: str) -> None:
    """Before each operation on a disk: the thread of a later file waits until those of the earlier ones have ended."""
    _, job, number = threading.current_thread().name.partition(_JOB)
    if not job:
        return
    for thread in threading.enumerate():
        other = thread.name.removeprefix(_JOB)
        if other != thread.name and int(other) < int(number):
            thread.join()
