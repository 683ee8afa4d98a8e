"""Whether an engine, and each replica of it, holds what was sent to it."""

from collections.abc import Mapping

from tidemill.errors import WeightSyncError

__all__ = ["compare_checksums", "compare_replicas"]


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
