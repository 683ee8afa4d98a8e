"""tidemill.engines.remote.routing."""

from collections import Counter

from tidemill.engines.remote.routing import Ring, routed

NAMES = [f"http://10.0.0.{index}:8000" for index in range(5)]
PROMPTS = [(index, index * 7, 3) for index in range(200) for _ in range(8)]


def owner(shares: dict[str, list[int]]) -> dict[int, str]:
    return {index: name for name, share in shares.items() for index in share}


def test_every_request_goes_to_one_replica_and_none_has_more_than_a_quarter_over_its_share() -> None:
    shares = routed(Ring(NAMES), PROMPTS, NAMES)
    assert sorted(index for share in shares.values() for index in share) == list(range(len(PROMPTS)))
    assert max(len(share) for share in shares.values()) <= 1.25 * len(PROMPTS) / len(NAMES) + 1
    assert all(share == sorted(share) for share in shares.values())


def test_samples_of_a_prompt_stay_together_but_for_the_few_at_a_bound() -> None:
    owners = owner(routed(Ring(NAMES), PROMPTS, NAMES))
    homes: dict[tuple[int, ...], set[str]] = {}
    for index, prompt in enumerate(PROMPTS):
        homes.setdefault(prompt, set()).add(owners[index])
    apart = [prompt for prompt, some in homes.items() if len(some) > 1]
    assert len(apart) <= len(NAMES)


def test_a_replica_that_goes_moves_its_own_prompts_and_few_others() -> None:
    ring = Ring(NAMES)
    before = owner(routed(ring, PROMPTS, NAMES))
    after = owner(routed(ring, PROMPTS, NAMES[1:]))
    stayed = [index for index in before if before[index] != NAMES[0]]
    moved = [index for index in stayed if after[index] != before[index]]
    assert len(moved) < 0.1 * len(stayed)


def test_equal_heads_are_one_prompt_and_later_steps_find_them_where_they_were() -> None:
    long = tuple(range(256))
    shares = routed(Ring(NAMES), [(*long, 1), (*long, 2)], NAMES)
    assert Counter(map(len, shares.values())) == Counter({0: 3, 1: 2}) or max(map(len, shares.values())) == 2
    assert owner(routed(Ring(NAMES), PROMPTS, NAMES)) == owner(routed(Ring(NAMES), PROMPTS, NAMES))


def test_nothing_to_ask_is_nothing_for_each() -> None:
    assert routed(Ring(NAMES), [], NAMES) == {name: [] for name in NAMES}
    assert len(Ring(NAMES).order((1, 2, 3))) == len(NAMES)
