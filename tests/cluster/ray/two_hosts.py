"""A cluster of several Ray nodes on this machine, joined by address; prints what was found as one line of JSON.

Run as a script: `python two_hosts.py FOLDER`. The nodes have one core each, so that two ranks that set a core aside
come to different ones.
"""

import contextlib
import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
from ray.cluster_utils import Cluster
from tests.cluster.ray.service import Service

from tidemill.cluster.ray import actors, placing
from tidemill.cluster.ray.cluster import RayCluster
from tidemill.cluster.ray.group import RayGroup
from tidemill.contracts.events import ignore
from tidemill.errors import WorkerDiedError

SETTINGS: dict[str, Any] = {
    "device": "cpu",
    "ranks": 2,
    "replicas": 0,
    "max_batch": 4,
    "seed": 1,
    "threads": 1,
    "transition_deadline": 30.0,
    "emit": ignore,
    "cpus": 1.0,
}


def error_of(work: Callable[[], Any]) -> str:
    """What it refuses with."""
    try:
        work()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing was refused"


def made(values: dict[str, Any], work: Callable[[RayCluster], Any]) -> Any:
    """What `work` finds on a cluster that it alone uses."""
    with contextlib.closing(RayCluster(**SETTINGS | values)) as cluster:
        return work(cluster)


def started(cluster: RayCluster) -> RayGroup:
    return cluster._built("trainer", 2, Service, meet=True)


def meeting(cluster: RayCluster) -> dict[str, Any]:
    group = started(cluster)
    found = {
        "nodes": len({member.node for member in group.members}),
        "rendezvous": group.call("rendezvous", deadline=20)[0],
        "interface": group.call("environment", "GLOO_SOCKET_IFNAME", deadline=20)[0],
        "sum": group.call("sum_of_ranks", deadline=60),
        "free": cluster.free_bytes(),
    }
    return found


def busy(cluster: RayCluster) -> str:
    placing._PLACED = 1.0
    try:
        return error_of(lambda: placing.reserve(cluster._demand))
    finally:
        placing._PLACED = 30.0


def unshared(values: dict[str, Any]) -> str:
    @contextlib.contextmanager
    def elsewhere(folder: Path) -> Any:
        yield folder / "seen-on-the-driver-only", "text"

    before, actors._token = actors._token, elsewhere
    try:
        return error_of(lambda: made(values, started))
    finally:
        actors._token = before


def sharing(values: dict[str, Any]) -> dict[str, Any]:
    """Which GPUs the workers of each role are given. There are none, so that PyTorch must not be asked."""
    before, actors._refuse_unusable = actors._refuse_unusable, lambda *told: None
    try:
        return made(values, gpus_of)
    finally:
        actors._refuse_unusable = before


def gpus_of(cluster: RayCluster) -> dict[str, Any]:
    groups = {
        name: cluster._built(name, len(role.spots), Service, meet=False) for name, role in cluster._places.items()
    }
    gpus = {name: group.call("environment", "CUDA_VISIBLE_DEVICES", deadline=20) for name, group in groups.items()}
    return gpus | {"device": cluster.device, "shares": cluster.shares_devices}


def death_of_a_host(cluster: RayCluster, nodes: Cluster, node: Any) -> dict[str, Any]:
    group = started(cluster)
    pending = [group.start(worker, "wait", 120.0) for worker in range(2)]
    time.sleep(0.5)
    began = time.monotonic()
    nodes.remove_node(node, allow_graceful=False)
    try:
        group.gather(pending, deadline=120.0, doing="wait")
    except WorkerDiedError as error:
        return {"error": str(error), "seconds": time.monotonic() - began, "notes": error.__notes__}
    return {}


def death_of_a_driver(address: str, folder: Path) -> list[int]:
    """Workers that are left 10 s after their driver was killed."""
    command = [sys.executable, __file__, str(folder), address]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as driver:
        assert driver.stdout is not None
        pids = json.loads(driver.stdout.readline())
        driver.send_signal(signal.SIGKILL)
    ends = time.monotonic() + 10
    while any(psutil.pid_exists(pid) for pid in pids) and time.monotonic() < ends:
        time.sleep(0.1)
    return [pid for pid in pids if psutil.pid_exists(pid)]


def be_a_driver(address: str, folder: Path) -> None:
    """Print the workers' numbers and wait for the end."""

    def wait(cluster: RayCluster) -> None:
        pids = [member.pid for member in started(cluster).members]
        print(json.dumps(pids), flush=True)  # noqa: T201
        time.sleep(600)

    made({"address": address, "log_folder": folder / "logs"}, wait)


def main(folder: Path) -> None:
    nodes = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "num_gpus": 0})
    second = nodes.add_node(num_cpus=1, num_gpus=0)
    here = {"address": nodes.address, "log_folder": folder / "logs"}
    found: dict[str, Any] = {"address": nodes.address}
    found["meeting"] = made(here, meeting)
    found["too many"] = error_of(lambda: made(here | {"ranks": 3}, meeting))
    found["no gpu"] = error_of(lambda: made(here | {"device": "cuda"}, meeting))
    found["busy"] = made(here, busy)
    found["unshared"] = unshared(here)
    found["orphans"] = death_of_a_driver(nodes.address, folder)
    found["death"] = made(here, lambda cluster: death_of_a_host(cluster, nodes, second))
    nodes.add_node(num_cpus=1, num_gpus=0, env_vars={"TIDEMILL_VERSIONS": "torch=9.9"})
    found["versions"] = error_of(lambda: made(here, started))
    nodes.add_node(num_cpus=0, num_gpus=2)
    gpus = here | {"device": "auto", "cpus": 0.0, "replicas": "auto"}
    found["no cuda"] = error_of(lambda: made(gpus, started))
    found["colocated"] = sharing(gpus)
    found["separate"] = sharing(gpus | {"ranks": 1, "placement": "separate"})
    found["too many gpus"] = error_of(lambda: made(gpus | {"placement": "separate"}, started))
    print(json.dumps(found), flush=True)  # noqa: T201
    nodes.shutdown()


if __name__ == "__main__":
    if len(sys.argv) > 2:
        be_a_driver(sys.argv[2], Path(sys.argv[1]))
    else:
        main(Path(sys.argv[1]))
