"""What needs a lease and what does not, by name: of tenants as their protocols name them, and of what is beside those.

A method that is in no table fails a test until somebody has said which it is.
"""

from typing import Any, NoReturn

from tidemill.contracts.footprint import Part

__all__ = ["EXTRA_FREE", "EXTRA_LEASED", "FREE", "LEASED", "SERVICE_FREE", "SERVICE_LEASED", "Untouchable"]


class Untouchable:
    """An argument at which nobody may look: who does has gone on without a lease."""

    def __getattribute__(self, name: str) -> NoReturn:
        raise AssertionError(f"an argument was touched ({name}) although there is no lease")

    def __iter__(self) -> NoReturn:
        raise AssertionError("an argument was iterated over although there is no lease")

    def __len__(self) -> NoReturn:
        raise AssertionError("an argument was measured although there is no lease")


THING: Any = Untouchable()
_ALL = Part.WEIGHTS | Part.OPTIMIZER | Part.GRADS
_ENGINE = Part.WEIGHTS | Part.KV_CACHE

# By method: the parts without any of which it is refused, and arguments to call it with.
LEASED: dict[str, tuple[Part, tuple[Any, ...]]] = {
    "begin": (_ALL, (THING,)),
    "step": (_ALL, (THING, THING)),
    "update": (_ALL, (THING, THING)),
    "log_probs": (Part.WEIGHTS, (THING,)),
    "named_weights": (Part.WEIGHTS, ()),
    "load": (_ALL, (THING,)),
    "begin_update": (Part.WEIGHTS, ()),
    "load_weights": (Part.WEIGHTS, (THING,)),
    "weight_checksums": (Part.WEIGHTS, ()),
    "publish": (Part.WEIGHTS, (THING,)),
    "load_pretrained": (Part.WEIGHTS, (THING,)),
    "generate": (_ENGINE, (THING, THING)),
}
_MOVES = "a transition, which residency alone calls, when no lease forbids it"
FREE = {
    "name": "a word",
    "gate": "the door itself",
    "resident": "looks at what is allocated, not into it",
    "footprint": "a sum that was made when the tenant was built",
    "host_bytes": "of host memory",
    "wake_up": _MOVES,
    "sleep": _MOVES,
    "snapshot": "of the host copy; one that is out of date needs the lease: a test of its own is below",
    "close": "the end of everything",
    "weight_specs": "names and shapes, which never change",
    "minibatches": "a setting",
    "vocabulary": "a number of the model's configuration",
    "park": "process groups, when every rank sleeps",
    "revive": "process groups, when every rank has memory again",
    "version": "a number",
    "dtype": "a word",
}

# Public methods that a backend has beside its protocol's.
EXTRA_LEASED: dict[str, tuple[Part, tuple[Any, ...]]] = {
    "start_shipment": (Part.WEIGHTS, (THING,)),
    "start_update": (Part.WEIGHTS, ()),
    "start_checksums": (Part.WEIGHTS, ()),
    "replica_checksums": (Part.WEIGHTS, ()),
    "landing": (Part.ALL, ()),
}
_CARRIES = "carries the gate's state to workers, whose own gates refuse: a test of its own is below"
EXTRA_FREE = {
    "group": "the workers",
    "deadlines": "numbers",
    "each": _CARRIES,
    "start": _CARRIES,
    "start_each": _CARRIES,
    "leave": _MOVES,
    "arrive": _MOVES,
    "end_each": "waits for what was started",
    "on_device": "of fakes: raises by itself when the memory is gone",
}

# Methods of a worker's service, as its driver calls them through `use`.
SERVICE_LEASED: dict[str, tuple[Part, tuple[Any, ...]]] = {
    **{name: LEASED[name] for name in ("begin", "update", "log_probs", "load")},
    **{name: LEASED[name] for name in ("begin_update", "weight_checksums", "publish", "load_pretrained", "generate")},
    "load_parcel": (Part.WEIGHTS, (THING,)),
    "open_shipment": (Part.WEIGHTS, (THING, THING, THING)),
    "next_parcel": (Part.WEIGHTS, ()),
    "take_parcel": (Part.WEIGHTS, ()),
}
_HOST_COPY = "of a snapshot, which lies in host memory"
SERVICE_FREE = {
    **{name: FREE[name] for name in ("wake_up", "sleep", "park", "revive", "dtype")},
    "use": "the way to all others, with the gate as the driver's is",
    "shift": "the way to the transitions",
    "describe": "numbers that never change",
    "describe_trainer": "numbers that never change",
    "where": "the machine, and the number of its GPU",
    "stand": "does nothing",
    "changes": "a count",
    "answered": "a count",
    "take_snapshot": FREE["snapshot"],
    "write_shard": _HOST_COPY,
    "place_shard": _HOST_COPY,
    "compare_shard": _HOST_COPY,
    "shard_state": _HOST_COPY,
    "abandon_shard": _HOST_COPY,
    "release_snapshot": _HOST_COPY,
    "close_shipment": "frees buffers of the shipment, after failures too; the tenant's memory is not looked at",
}
