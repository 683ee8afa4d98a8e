"""A driver with two workers on a private cluster, which prints their numbers as JSON and then ends in the way told.

Run as a script: `python driver.py HOW`. Its workers are plain actors: what is tested is who is left behind.
"""

import json
import signal
import sys
import time
from types import FrameType
from typing import Any

import ray

from tidemill.cluster.ray.connection import connect
from tidemill.cluster.ray.private import PrivateCluster


class Sleeper:
    """A worker that is busy."""

    def pid(self) -> int:
        import os

        return os.getpid()

    def sleep(self) -> None:
        time.sleep(600)


def stop(number: int, frame: FrameType | None) -> None:
    """As the run's own handler, when it may raise."""
    raise InterruptedError(f"signal {number}")


def main(how: str) -> None:
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, stop)
    began = time.monotonic()
    cluster = PrivateCluster(cpus=1, gpus=0, store_bytes=80 << 20)
    try:
        connect(cluster.address, private=True, say=print)
        started = time.monotonic() - began
        actors: list[Any] = [ray.remote(num_cpus=0.01)(Sleeper).remote() for _ in range(2)]
        pids = ray.get([actor.pid.remote() for actor in actors])
        busy = [actor.sleep.remote() for actor in actors]
        told = {"pids": pids, "folder": str(cluster.folder), "address": cluster.address, "started": started}
        print(json.dumps(told), flush=True)  # noqa: T201
        if how == "error":
            raise RuntimeError("on purpose")
        while how == "wait":
            ray.wait(busy, timeout=0.1)
        while how == "check":
            cluster.check()
            time.sleep(0.1)
    finally:
        # An ordinary end and an exception close the cluster; a signal's handler leads here too.
        ray.shutdown()
        cluster.close()


if __name__ == "__main__":
    main(sys.argv[1])
