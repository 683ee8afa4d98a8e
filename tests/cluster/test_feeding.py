"""tidemill.cluster.feeding, tidemill.cluster.whereabouts and tidemill.cluster.spreading: who serves whom."""

import pytest

from tidemill.cluster.feeding import plan_feeding
from tidemill.cluster.spreading import cut
from tidemill.cluster.whereabouts import Whereabouts, whereabouts
from tidemill.contracts.engine import Request


def at(host: str, gpu: str = "") -> Whereabouts:
    return Whereabouts(host=host, gpu=gpu)


@pytest.mark.parametrize(
    ("ranks", "replicas", "feeder", "carrier"),
    [
        # One machine without a GPU: in turn.
        ([at("a")] * 2, [at("a")] * 3, (0, 1, 0), ("bytes", "bytes")),
        ([at("a")] * 2, [at("a")], (0,), ("bytes", "none")),
        # The same GPUs, in whatever order.
        ([at("a", "0"), at("a", "1")], [at("a", "1"), at("a", "0")], (1, 0), ("ipc", "ipc")),
        # GPUs of their own on the same machine.
        ([at("a", "0"), at("a", "1")], [at("a", "2"), at("a", "3")], (0, 1), ("bytes", "bytes")),
        # One rank feeds a replica on its GPU and one beside it.
        ([at("a", "0")], [at("a", "0"), at("a", "1")], (0, 0), ("bytes",)),
        # Two machines with a rank each; and a third that has none.
        ([at("a", "0"), at("b", "1")], [at("b", "2"), at("a", "0")], (1, 0), ("ipc", "bytes")),
        ([at("a", "0"), at("b", "1")], [at("c", "2"), at("c", "3")], (0, 1), ("bytes", "bytes")),
        # The id of a GPU says nothing on another machine.
        ([at("a", "0")], [at("b", "0")], (0,), ("bytes",)),
    ],
)
def test_the_nearest_rank_feeds(ranks: object, replicas: object, feeder: object, carrier: object) -> None:
    plan = plan_feeding(ranks, replicas)
    assert plan.feeder == feeder
    assert plan.carrier == carrier


def test_this_process_is_where_it_is() -> None:
    assert whereabouts() == whereabouts()
    assert whereabouts().host


def requests(lengths: list[int]) -> list[Request]:
    return [Request(key=str(index), token_ids=(5,) * length) for index, length in enumerate(lengths)]


def test_a_lone_replica_gets_everything_in_order() -> None:
    assert cut(requests([3, 9, 1]), replicas=1, max_batch=1) == [[0, 1, 2]]
    assert cut([], replicas=1, max_batch=1) == [[]]


def test_chunks_are_longest_first_of_at_most_a_batch_and_enough_for_all_replicas() -> None:
    assert cut(requests([3, 9, 1, 9, 5]), replicas=2, max_batch=2) == [[1, 3], [4, 0], [2]]
    assert cut(requests([3, 9, 1, 9, 5]), replicas=2, max_batch=64) == [[1, 3, 4], [0, 2]]
    assert cut(requests([1]), replicas=4, max_batch=64) == [[0]]
    assert cut([], replicas=2, max_batch=4) == [[]]
