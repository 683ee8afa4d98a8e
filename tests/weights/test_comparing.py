"""What an engine holds against what was sent (`tidemill.weights.comparing`)."""

import pytest

from tidemill.errors import WeightSyncError
from tidemill.weights.comparing import compare_checksums, compare_replicas

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
