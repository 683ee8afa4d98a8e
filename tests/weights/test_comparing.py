"""What an engine holds against what was sent (`tidemill.weights.comparing`)."""

import pytest

from tidemill.errors import WeightSyncError
from tidemill.weights.comparing import compare_checksums, compare_parcels, compare_replicas, compare_specs

SENT = {"a": 1, "b": 2, "c": 3}


def test_equal_checksums_pass() -> None:
    compare_checksums(SENT, dict(reversed(SENT.items())), "engine")
    compare_replicas({"engine-0": SENT})
    compare_replicas({"engine-0": SENT, "engine-1": dict(SENT)})


@pytest.mark.parametrize(
    ("held", "words"),
    [
        ({"a": 1, "b": 2}, r"engine holds 0 .* 1 that it does not hold \['c'\]"),
        ({**SENT, "d": 4}, r"did not send \['d'\]"),
        ({**SENT, "b": 9}, r"1 of 3 weights differ in engine after the copy, \['b'\]"),
    ],
)
def test_a_weight_missing_left_over_or_changed_is_named(held: dict[str, int], words: str) -> None:
    with pytest.raises(WeightSyncError, match=words):
        compare_checksums(SENT, held, "engine")


@pytest.mark.parametrize("held", [{"a": 1, "b": 2}, {**SENT, "d": 4}, {**SENT, "b": 9}])
def test_a_replica_that_differs_is_named_with_the_weight(held: dict[str, int]) -> None:
    with pytest.raises(WeightSyncError, match=r"between engine-0 and engine-2, \['[bcd]'\]"):
        compare_replicas({"engine-0": SENT, "engine-1": SENT, "engine-2": held})


TOLD = {"a": ("F32", (2, 3)), "b": ("F32", ())}


@pytest.mark.parametrize(
    ("came", "words"),
    [
        ({"a": ("F32", (2, 3))}, "b came as nothing and should be F32 \\[\\]"),
        ({**TOLD, "c": ("F32", (1,))}, "c came as F32 \\[1\\] and should be nothing"),
        ({**TOLD, "a": ("F32", (3, 2))}, "a came as F32 \\[3, 2\\] and should be F32 \\[2, 3\\]"),
        ({**TOLD, "a": ("BF16", (2, 3))}, "a came as BF16"),
    ],
)
def test_weights_other_than_told_are_named(came: dict[str, tuple[str, tuple[int, ...]]], words: str) -> None:
    compare_specs(TOLD, dict(reversed(TOLD.items())))
    with pytest.raises(WeightSyncError, match=words):
        compare_specs(TOLD, came)


@pytest.mark.parametrize(
    ("loaded", "words"),
    [
        ([1, 3], "loaded 2 parcels of weights where 3 were sent: 1 did not arrive, 0 are of no parcel"),
        ([1, 2, 2, 3], "0 did not arrive, 0 are of no parcel that was sent, and 1 came again"),
        ([1, 9, 3], "1 did not arrive, 1 are of no parcel"),
        ([2, 1, 3], "0 did not arrive"),
    ],
)
def test_parcels_left_out_repeated_exchanged_or_unknown_are_noticed(loaded: list[int], words: str) -> None:
    compare_parcels([1, 2, 3], [1, 2, 3], "engine-1")
    with pytest.raises(WeightSyncError, match=f"engine-1 .*{words}"):
        compare_parcels([1, 2, 3], loaded, "engine-1")
