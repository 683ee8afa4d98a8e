"""torch.distributed's `new_group`, wrapped so that every call of this process can be made again later.

Why: torch keeps no record from which the groups of a destroyed world could be made anew under their old names.
Versions: torch 2.11 to 2.13. May go when torch can suspend and resume communicators (NCCL 2.29.7 or later, and a torch
that offers it). Check: `install` raises unless each module that calls `new_group` holds the wrapper afterwards.
"""

import functools
from collections.abc import Callable, Collection
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed import device_mesh, distributed_c10d

from tidemill.errors import ResidencyError

__all__ = ["RecordedGroups"]

# Each holds its own reference to the function: callers reach it through any of them.
_MODULES: tuple[Any, ...] = (distributed_c10d, dist, device_mesh)


@dataclass(frozen=True, kw_only=True, eq=False)
class _Call:
    """One call, and the name of the group that it made; empty where this rank is no member.

    `before` are the groups that there were when it was made: some names depend on how many there are.
    """

    positional: tuple[Any, ...]
    keyword: dict[str, Any]
    name: str
    before: frozenset[str]


class RecordedGroups:
    """The calls of `new_group` since `install`, in order. Ranks make the same calls in the same order.

    Collectives of a group for which no other timeout is asked end after `timeout`: torch would wait for half an hour.
    """

    def __init__(self, *, timeout: timedelta) -> None:
        self._timeout = timeout
        self._calls: list[_Call] = []
        self._make: Callable[..., Any] = distributed_c10d.new_group
        self._wrapper: Callable[..., Any] = self._make

    @property
    def names(self) -> set[str]:
        """Of the groups made, those destroyed since included."""
        return {call.name for call in self._calls if call.name}

    def install(self) -> None:
        """Record from now on. May be called twice. Raises ResidencyError when torch has the function elsewhere."""
        if self._wrapper is not self._make:
            return
        make = self._make = distributed_c10d.new_group

        @functools.wraps(make)
        def recorded(*positional: Any, **keyword: Any) -> Any:
            if self._wrapper is not recorded:
                # Others may have kept this function, or put it back, after `remove`.
                return make(*positional, **keyword)
            positional, keyword = self._ending(positional, keyword)
            before = frozenset(_present())
            group = make(*positional, **keyword)
            self._calls.append(_Call(positional=positional, keyword=keyword, name=_name(group), before=before))
            return group

        for module in _MODULES:
            if vars(module).get("new_group") is not make:
                raise ResidencyError(
                    f"cannot record process groups: {module.__name__}.new_group is not torch's own in this version of "
                    "torch, or something else has replaced it; parking works with torch 2.11 to 2.13"
                )
        for module in _MODULES:
            module.new_group = recorded
        self._wrapper = recorded

    def remove(self) -> None:
        """Record no more. May be called twice; a wrapper that others have laid around this one stays theirs."""
        for module in _MODULES:
            if vars(module)["new_group"] is self._wrapper:
                module.new_group = self._make
        self._wrapper = self._make

    def replay(self, *, alive: set[str]) -> None:
        """Make all groups again, in order; of them only those named in `alive` stay.

        Every rank must call it. Raises ResidencyError when a name moved: what goes by name would find another group.
        """
        for call in self._calls:
            self._destroy_all_but(call.before)
            group = self._make(*call.positional, **call.keyword)
            if _name(group) != call.name:
                raise ResidencyError(
                    f"cannot revive process groups: group {call.name!r} came back as {_name(group)!r}; a group was "
                    "made while the others were parked, or not through `new_group`"
                )
        self._destroy_all_but(alive)

    def _ending(self, positional: tuple[Any, ...], keyword: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The same call, with our timeout where it has none: `timeout` is the second of its arguments."""
        if len(positional) > 1:
            ranks, timeout, *others = positional
            return (ranks, self._timeout if timeout is None else timeout, *others), keyword
        if keyword.get("timeout") is None:
            return positional, {**keyword, "timeout": self._timeout}
        return positional, keyword

    def _destroy_all_but(self, kept: Collection[str]) -> None:
        surplus = _present() & self.names - set(kept)
        for group in [group for group in distributed_c10d._world.pg_map if _name(group) in surplus]:
            dist.destroy_process_group(group)


def _present() -> set[str]:
    return {str(name) for name in distributed_c10d._world.pg_names.values()}


def _name(group: Any) -> str:
    return str(group.group_name) if isinstance(group, dist.ProcessGroup) else ""
