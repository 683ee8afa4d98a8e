"""Ray's inner names that a driver needs: what it prints goes elsewhere, 127.0.0.1 is an address, tokens are read anew.

Why: Ray prints through a terminal that is ours, and offers no other way; off Windows and macOS it replaces 127.0.0.1 by
an address that others reach; and it reads how to authenticate once, when it is imported, which is before a cluster of
our own has a token. Versions: Ray 2.60. May go when Ray has settings for the three. Check: `refuse_other_ray` raises
unless each name is there and Ray's own code goes by it.
"""

import contextlib
from collections.abc import Callable, Iterator
from types import FunctionType
from typing import Any

import ray
from ray import _raylet
from ray._private import ray_constants, services
from ray._private import worker as ray_worker

from tidemill.errors import PluginError

__all__ = ["on_loopback", "print_through", "read_authentication_again", "refuse_other_ray"]

# Each is looked up when it is used, by the function behind it, which must go by that name.
_PRINT, _SWITCH = "print_to_stdstream", "ENABLE_RAY_CLUSTER"
_GO_BY = (
    (ray_worker, _PRINT, ray_worker, "listen_error_messages"),
    (ray_constants, _SWITCH, services, "get_node_ip_address"),
)


def refuse_other_ray() -> None:
    """Raises PluginError, with the install command, for a Ray that has not what is used here."""
    missing = [
        f"{module.__name__}.{name}"
        for module, name, user, function in _GO_BY
        if not _goes_by(module, name, user, function)
    ]
    missing += [f"ray._raylet.{name}" for name in ("AuthenticationTokenLoader", "Config") if name not in vars(_raylet)]
    if missing:
        raise PluginError(
            f"cannot use Ray {ray.__version__}: it has no {', '.join(missing)} as Ray 2.60 has; "
            "pip install 'ray==2.60.*', on every host"
        )


def _goes_by(module: Any, name: str, user: Any, function: str) -> bool:
    there = vars(user).get(function)
    return name in vars(module) and isinstance(there, FunctionType) and name in there.__code__.co_names


def print_through(told: Callable[..., None]) -> None:
    """Whatever Ray would print of its cluster goes to `told(data)`; the last caller gets it."""
    vars(ray_worker)[_PRINT] = told


def read_authentication_again() -> None:
    """From the environment as it is now."""
    compiled = vars(_raylet)
    compiled["Config"].initialize("")
    compiled["AuthenticationTokenLoader"].instance().reset_cache()


@contextlib.contextmanager
def on_loopback() -> Iterator[None]:
    """Let 127.0.0.1 be an address for Ray here, as in the cluster's processes, which read this when they start."""
    before = vars(ray_constants)[_SWITCH]
    vars(ray_constants)[_SWITCH] = False
    try:
        yield
    finally:
        vars(ray_constants)[_SWITCH] = before
