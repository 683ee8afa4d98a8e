"""Parts of a tenant's device memory, and how many bytes each takes."""

import enum

__all__ = ["Part"]


class Part(enum.Flag):
    """What a tenant keeps on the device; combine with `|`, test with `in`."""

    NONE = 0
    WEIGHTS = enum.auto()
    OPTIMIZER = enum.auto()
    GRADS = enum.auto()
    KV_CACHE = enum.auto()
    GRAPHS = enum.auto()
    ALL = WEIGHTS | OPTIMIZER | GRADS | KV_CACHE | GRAPHS

    def words(self) -> str:
        """`weights, kv cache` for messages; `all` for everything."""
        if self == Part.ALL:
            return "all"
        return ", ".join((part.name or "").lower().replace("_", " ") for part in self) or "nothing"
