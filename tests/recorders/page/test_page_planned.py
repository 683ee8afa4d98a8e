"""The plan on the run page (`tidemill.recorders.page.planned`)."""

from typing import Any

import pytest

from tidemill.recorders.page.planned import plan_caption, plan_rows
from tidemill.units import GIB

PLAN: dict[str, Any] = {
    "offload": {"text": "offload is always: they take turns"},
    "tenants": {"trainer": {"device": 10 * GIB, "host": 8 * GIB}, "engine": {"device": 4 * GIB, "host": 256}},
    "devices": [{"name": "trainer", "largest": "optimizer", "moments": [{"name": "optimizer", "bytes": 12 * GIB}]}],
    "host": {"largest": "start", "moments": [{"name": "asleep", "bytes": 1}, {"name": "start", "bytes": 9 * GIB}]},
}
TIMINGS = [
    {"memory/device/trainer": 2.0 * GIB, "memory/host/trainer": 8.0 * GIB},
    {"memory/device/trainer": 11.0 * GIB, "memory/device/engine": float(4 * GIB), "memory/host/engine": 256.0},
]


def test_each_tenants_plan_stands_beside_the_most_that_it_held() -> None:
    rows = plan_rows(PLAN, TIMINGS).split("<tr>")[1:]
    assert "<td>trainer</td><td>device</td><td>10.0 GiB</td><td>11.0 GiB</td><td>+10.0 %</td>" in rows[0]
    assert "<td>trainer</td><td>host</td><td>8.0 GiB</td><td>8.0 GiB</td><td>+0.0 %</td>" in rows[1]
    assert "<td>engine</td><td>device</td><td>4.0 GiB</td><td>4.0 GiB</td><td>+0.0 %</td>" in rows[2]
    assert len(rows) == 4


def test_before_the_first_step_only_the_plan_is_known() -> None:
    assert "<td>10.0 GiB</td><td></td><td></td>" in plan_rows(PLAN, [])


def test_the_caption_names_the_decision_and_the_fullest_moments() -> None:
    assert plan_caption(PLAN) == (
        "offload is always: they take turns; each GPU (trainer) is fullest at optimizer, with 12.0 GiB; host memory is "
        "fullest at start, with 9.0 GiB"
    )


@pytest.mark.parametrize(
    "plan",
    [
        {},
        {"tenants": 3, "offload": [], "devices": {}, "host": None},
        {"tenants": {"a": 3, "b": {"device": "x"}}, "devices": [1, {"moments": [2], "largest": 3}]},
    ],
)
def test_what_somebody_edited_does_no_harm(plan: dict[str, Any]) -> None:
    assert plan_rows(plan, TIMINGS) == ""
    assert plan_caption(plan) == ""


def test_text_is_escaped() -> None:
    assert "<b>" not in plan_rows({"tenants": {"<b>": {"device": 1}}}, []) + plan_caption({"offload": {"text": "<b>"}})
