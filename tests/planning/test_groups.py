"""`tidemill.planning.groups`: when process groups go in sleep."""

import pytest

from tidemill.planning.groups import GROUP_BYTES, parks_groups

ON_GPUS = {"offload": "auto", "device": "cuda", "ranks": 2, "budget": 10 * GROUP_BYTES, "engine_bytes": 9 * GROUP_BYTES}


def test_one_rank_has_none_and_who_asks_for_them_to_go_is_told() -> None:
    goes, why = parks_groups("always", **{**ON_GPUS, "ranks": 1})
    assert not goes and "has no effect with one rank" in why
    for mode in ("auto", "never"):
        assert parks_groups(mode, **{**ON_GPUS, "ranks": 1}) == (False, "")


def test_they_stay_where_the_engine_has_room_beside_them_and_go_where_it_has_not() -> None:
    stay, why = parks_groups("auto", **ON_GPUS)
    assert not stay
    assert "stay while trainer sleeps: the engine (18.0 GiB) has room beside them" in why
    goes, why = parks_groups("auto", **{**ON_GPUS, "engine_bytes": 9 * GROUP_BYTES + 1})
    assert goes
    assert "the engine may need their memory" in why


def test_always_offloading_gives_them_back_too() -> None:
    assert parks_groups("auto", **{**ON_GPUS, "offload": "always"})[0]


def test_on_a_cpu_they_hold_no_device_memory() -> None:
    assert parks_groups("auto", **{**ON_GPUS, "device": "cpu", "engine_bytes": 10**12}) == (False, "")


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_the_setting_has_the_last_word_and_it_is_said(device: str) -> None:
    assert parks_groups("always", **{**ON_GPUS, "device": device}) == (
        True,
        "process groups are given back while trainer sleeps",
    )
    assert parks_groups("never", **{**ON_GPUS, "device": device, "offload": "always"}) == (
        False,
        "process groups are kept while trainer sleeps",
    )
