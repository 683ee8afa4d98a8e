"""The process that starts a private cluster's daemons, says where they are, and ends with whoever started it.

Started as `python -m tidemill.cluster.ray.head SETTINGS`, JSON. One line of JSON comes out: `{"address": ...}`, or
`{"error": ...}`. The daemons die with it, by the kernel; it ends when its standard input does.
"""

import json
import os
import select
import shutil
import sys
from typing import Any

import psutil
import ray

__all__ = ["main"]


def main(settings: dict[str, Any]) -> None:
    """Start, tell, wait, clean up."""
    # What Ray prints on its way is for the log; only the answer goes out. Who reads it sees by its end that we ended.
    with os.fdopen(os.dup(1), "w") as out:
        os.dup2(2, 1)
        answer = _started(settings)
        print(json.dumps(answer), file=out, flush=True)
        if "address" in answer:
            if _dismissed():
                ray.shutdown()
            shutil.rmtree(settings["folder"], ignore_errors=True)
            # Leaving in order, Ray would look for daemons that are gone for seconds, and the driver would not know.
            os._exit(0)


def _dismissed() -> bool:
    """Waits. True when the input ended, False when a daemon did: Ray itself takes long to see that."""
    vital = [child for child in psutil.Process().children() if child.name() in ("gcs_server", "raylet")]
    while not select.select([0], [], [], 0.5)[0]:
        if any(not child.is_running() or child.status() == psutil.STATUS_ZOMBIE for child in vital):
            return False
    return True


def _started(settings: dict[str, Any]) -> dict[str, str]:
    try:
        ray.init(
            num_cpus=settings["cpus"],
            num_gpus=settings["gpus"],
            object_store_memory=settings["store_bytes"],
            include_dashboard=False,
            log_to_driver=False,
            # Ray opens its folder to everybody; the one around it is closed.
            _temp_dir=f"{settings['folder']}/r",
            _plasma_directory=settings["store_folder"],
            _node_ip_address="127.0.0.1",
        )
        return {"address": ray.get_runtime_context().gcs_address}
    except Exception as error:  # whatever stops Ray is told to the one who waits
        return {"error": f"{type(error).__name__}: {error}"}


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
