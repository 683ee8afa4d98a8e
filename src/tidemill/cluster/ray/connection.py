"""The driver's connection to a Ray cluster: probed first, quiet, and without Ray's own signal handlers."""

import contextlib
import functools
import logging
import secrets
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import ray

from tidemill.compat import ray_driver
from tidemill.errors import ClusterError
from tidemill.units import format_seconds

__all__ = ["connect", "probe", "refuse_second_connection"]

_TCP = 5.0
_ANSWER = 30.0  # most of it is importing Ray, on a busy machine
_SAID = 200  # characters: Ray's messages are long, and the first sentence says it


def refuse_second_connection() -> None:
    """A process is connected to one cluster at most. Raises ClusterError."""
    if ray.is_initialized():
        raise ClusterError(
            "cannot use Ray for this run: this process is connected to a Ray cluster already; call ray.shutdown() first"
        )


def connect(address: str, *, private: bool, say: Callable[[str], None]) -> None:
    """Be a driver of the cluster at `address`, which has been probed; what Ray has to tell goes to `say`.

    Raises ClusterError, and PluginError for a Ray that has not what is needed.
    """
    ray_driver.refuse_other_ray()
    ray_driver.read_authentication_again()
    ray_driver.print_through(functools.partial(_told, say))
    try:
        with _signal_handlers_kept(), ray_driver.on_loopback() if private else contextlib.nullcontext():
            ray.init(
                address=address,
                namespace=f"tidemill-{secrets.token_hex(8)}",
                log_to_driver=False,
                logging_level=logging.ERROR,
                _node_ip_address="127.0.0.1" if private else None,
            )
    except Exception as error:  # Ray raises ConnectionError, RuntimeError, ValueError and its own
        ray.shutdown()
        raise ClusterError(_why(address, error)) from error


def _why(address: str, error: Exception) -> str:
    text = " ".join(str(error).split())
    if "ersion mismatch" in text:
        what = "install the same versions of Python and Ray on every host"
    elif "uthenticat" in text or "token" in text:
        what = "set RAY_AUTH_MODE and the token as on the cluster's other hosts"
    else:
        what = f"this machine must be a host of that cluster: run `ray start --address={address}` on it first"
    return f"cannot join the Ray cluster at {address}: {type(error).__name__}: {text}; {what}"


def probe(address: str) -> None:
    """Whether a Ray cluster answers there, in seconds. Raises ClusterError."""
    host, _, port = address.rpartition(":")
    start = f"check cluster.address, or start a cluster there with `ray start --head --port={port}`"
    try:
        socket.create_connection((host, int(port)), _TCP).close()
    except (OSError, OverflowError) as error:
        raise ClusterError(f"cannot reach the Ray cluster at {address}: {error}; {start}") from error
    # Ray itself would try for most of a minute, and then end this process on some of the ways to fail.
    command = [sys.executable, "-m", "ray.scripts.scripts", "health-check", "--address", address]
    try:
        asked = subprocess.run([*command, "--skip-version-check"], timeout=_ANSWER, capture_output=True, check=False)
    except subprocess.TimeoutExpired:
        raise ClusterError(
            f"cannot join {address}: something listens there, but did not answer as a Ray cluster within "
            f"{format_seconds(_ANSWER)}: it is no Ray cluster, or a machine is too busy to ask or to answer; {start}"
        ) from None
    if asked.returncode:
        raise ClusterError(
            f"cannot join {address}: no Ray cluster answers there, or it wants a token that this machine has not; "
            f"{start}, and set RAY_AUTH_MODE and the token as there"
        )


def _told(say: Callable[[str], None], data: Mapping[str, Any], **_: Any) -> None:
    """Instead of Ray's own printing, which would tear what we show: a line of the cluster's, not of a worker's."""
    for text in data["lines"]:
        words = " ".join(str(text).split())
        say(words if len(words) <= _SAID else f"{words[:_SAID]}...")


@contextlib.contextmanager
def _signal_handlers_kept() -> Iterator[None]:
    """Ray takes SIGTERM for itself; ours saves the run."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
