from itertools import pairwise

import pytest

from tidemill.contracts.engine import Request, Sampling
from tidemill.engines.common.requests import Limits, check_requests, check_sampling, plan_batches
from tidemill.errors import EngineError

LIMITS = Limits(context=64, vocabulary=100, max_batch=4, kv_tokens=256)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"max_new_tokens": 0}, "max_new_tokens = 0"),
        ({"max_new_tokens": 1, "temperature": -0.1}, "temperature -0.1"),
        ({"max_new_tokens": 1, "temperature": float("nan")}, "temperature nan"),
        ({"max_new_tokens": 1, "temperature": float("inf")}, "temperature inf"),
        ({"max_new_tokens": 1, "top_p": 0.0}, "top_p = 0.0"),
        ({"max_new_tokens": 1, "top_p": 1.1}, "top_p = 1.1"),
        ({"max_new_tokens": 1, "top_k": -1}, "top_k = -1"),
        ({"max_new_tokens": 1, "stop": ("a", "")}, "empty stop string"),
        ({"max_new_tokens": 1, "stop_token_ids": (100,)}, "token id 100"),
    ],
)
def test_sampling_that_describes_no_distribution_is_refused(settings, words) -> None:
    with pytest.raises(EngineError, match=words):
        check_sampling(Sampling(**settings), LIMITS)


@pytest.mark.parametrize(
    ("ids", "words"),
    [
        ((), "holds no token"),
        ((5, 100), "from 5 to 100"),
        ((-1, 5), "from -1 to 5"),
        ((5,) * 57, "57 prompt tokens and 8 new ones are 65, more than the 64"),
    ],
)
def test_a_prompt_that_cannot_be_answered_is_named(ids, words) -> None:
    requests = [Request(key="fine", token_ids=(5,) * 56), Request(key="0:x#1", token_ids=ids)]
    with pytest.raises(EngineError, match=f"0:x#1.*{words}"):
        check_requests(requests, Sampling(max_new_tokens=8), LIMITS)


def test_a_cache_smaller_than_the_context_is_the_limit() -> None:
    limits = Limits(context=64, vocabulary=100, max_batch=4, kv_tokens=32)
    with pytest.raises(EngineError, match="more than the 32 that the cache"):
        check_requests([Request(key="a", token_ids=(5,) * 30)], Sampling(max_new_tokens=8), limits)


def test_two_requests_with_one_key_are_refused() -> None:
    requests = [Request(key="a", token_ids=(1,)), Request(key="a", token_ids=(2,))]
    with pytest.raises(EngineError, match="one key a"):
        check_requests(requests, Sampling(max_new_tokens=8), LIMITS)


def test_batches_hold_every_request_once_shortest_first_and_keep_to_both_limits() -> None:
    lengths = [9, 60, 3, 3, 40, 41, 60, 1, 9, 9, 9]
    batches = plan_batches(lengths, new_tokens=4, limits=LIMITS)
    flat = [index for batch in batches for index in batch]
    assert sorted(flat) == list(range(len(lengths)))
    assert flat == sorted(flat, key=lambda index: (lengths[index], index))
    for batch in batches:
        assert len(batch) <= LIMITS.max_batch
        assert len(batch) * (max(lengths[index] for index in batch) + 4) <= LIMITS.kv_tokens
    for batch, following in pairwise(batches):
        grown = [*batch, following[0]]
        cost = len(grown) * (lengths[following[0]] + 4)
        assert len(grown) > LIMITS.max_batch or cost > LIMITS.kv_tokens, "no batch is smaller than it must be"
    assert plan_batches([], new_tokens=4, limits=LIMITS) == []
