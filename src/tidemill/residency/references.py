"""Objects of torch that hold process groups as objects: emptied while groups are parked, filled again afterwards.

Everything else goes by a group's name, which stays the same. What still held an old group would keep its memory.
"""

from collections.abc import Iterable, Iterator, MutableMapping
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist

from tidemill.errors import ResidencyError

__all__ = ["ParkedGroup", "References"]


class ParkedGroup:
    """Stands where a process group stood: whoever would use it is told, instead of waiting for ever."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, attribute: str) -> Any:
        raise ResidencyError(
            f"cannot use process group {self._name!r} ({attribute}): it is parked; wake the tenant and revive its "
            "groups first"
        )


@dataclass(frozen=True, kw_only=True, eq=False)
class _Reference:
    """Under `key` of `holder` stood the group called `name`."""

    holder: MutableMapping[str, Any]
    key: str
    name: str


class References:
    """What was taken out, and where it goes back to."""

    def __init__(self) -> None:
        self._taken: list[_Reference] = []

    @property
    def names(self) -> set[str]:
        """Of the groups that were taken out."""
        return {reference.name for reference in self._taken}

    def take_out(self, owners: Iterable[Any]) -> None:
        """Put a ParkedGroup wherever an attribute of an owner, or an entry of a dict among them, is a group."""
        for owner in owners:
            for holder in _mappings(vars(owner)):
                for key, value in list(holder.items()):
                    if isinstance(value, dist.ProcessGroup):
                        name = str(value.group_name)
                        self._taken.append(_Reference(holder=holder, key=key, name=name))
                        holder[key] = ParkedGroup(name)

    def put_back(self, groups: MutableMapping[str, dist.ProcessGroup]) -> None:
        """Put in the groups of the same names. Raises ResidencyError for a name that `groups` does not have."""
        for reference in self._taken:
            if reference.name not in groups:
                raise ResidencyError(
                    f"cannot revive process groups: {reference.key} needs group {reference.name!r}, which was not "
                    "made again, as it was not made by `new_group`"
                )
            reference.holder[reference.key] = groups[reference.name]
        self._taken.clear()


def _mappings(attributes: MutableMapping[str, Any]) -> Iterator[MutableMapping[str, Any]]:
    yield attributes
    yield from (value for value in attributes.values() if type(value) is dict)
