"""Whether an engine, and each replica of it, holds what was sent to it, and was sent what the trainer has."""

from collections.abc import Mapping, Sequence

from tidemill.errors import WeightSyncError

__all__ = ["compare_checksums", "compare_parcels", "compare_replicas", "compare_specs"]

_Specs = Mapping[str, tuple[str, tuple[int, ...]]]


def compare_specs(told: _Specs, came: _Specs) -> None:
    """Raises WeightSyncError, naming weights, unless names, dtypes and shapes that came are those the trainer told."""
    differing = sorted(name for name in {*told, *came} if told.get(name) != came.get(name))
    if differing:
        first = differing[0]
        raise WeightSyncError(
            f"the trainer handed out {len(differing)} weights other than it says it has: {first} came as "
            f"{_spec(came, first)} and should be {_spec(told, first)}; nothing of it is used"
        )


def _spec(specs: _Specs, name: str) -> str:
    if name not in specs:
        return "nothing"
    dtype, shape = specs[name]
    return f"{dtype} {list(shape)}"


def compare_parcels(sent: Sequence[int], loaded: Sequence[int], engine: str) -> None:
    """Raises WeightSyncError unless `engine` loaded the parcels that were sent, once each and in order, by digest."""
    if list(sent) == list(loaded):
        return
    missing, unexpected = len(set(sent) - set(loaded)), len(set(loaded) - set(sent))
    raise WeightSyncError(
        f"{engine} loaded {len(loaded)} parcels of weights where {len(sent)} were sent: {missing} did not arrive, "
        f"{unexpected} are of no parcel that was sent, and {len(loaded) - len(set(loaded))} came again; it refuses to "
        "generate until a whole sync succeeds"
    )


def compare_checksums(sent: Mapping[str, int], held: Mapping[str, int], engine: str) -> None:
    """Raises WeightSyncError, naming weights, unless `held` by `engine` has the names and checksums of `sent`."""
    missing, unexpected = sorted(set(held) - set(sent)), sorted(set(sent) - set(held))
    if missing or unexpected:
        raise WeightSyncError(
            f"{engine} holds {len(missing)} weights that the trainer did not send {missing[:5]}, and was sent "
            f"{len(unexpected)} that it does not hold {unexpected[:5]}; trainer and engine are not the same model"
        )
    differing = sorted(name for name in sent if sent[name] != held[name])
    if differing:
        raise WeightSyncError(
            f"{len(differing)} of {len(sent)} weights differ in {engine} after the copy, {differing[:5]}; it refuses "
            "to generate until a whole sync succeeds"
        )


def compare_replicas(held: Mapping[str, Mapping[str, int]]) -> None:
    """Raises WeightSyncError, naming replica and weights, unless all hold the same. `held` is by the replica's name."""
    (first, expected), *others = held.items()
    for replica, sums in others:
        differing = sorted(name for name in {*expected, *sums} if expected.get(name) != sums.get(name))
        if differing:
            raise WeightSyncError(
                f"{len(differing)} of {len(expected)} weights differ between {first} and {replica}, {differing[:5]}; "
                "they refuse to generate until a whole sync succeeds"
            )
