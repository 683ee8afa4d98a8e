"""`python -m benchmarks.rollout`: what it compares is comparable, and its numbers come out."""

import json
from pathlib import Path

import pytest
from benchmarks.rollout.__main__ import main
from benchmarks.rollout.cases import CASES, prompts_of


@pytest.mark.parametrize("name", sorted(CASES))
def test_prompts_are_of_one_length_alike_in_a_group_and_others_each_turn(name: str) -> None:
    case = CASES[name]
    first, second = (prompts_of(case, turn) for turn in (0, 1))
    assert [len(prompt) for prompt in first] == [case.length] * case.rows
    for row in range(0, case.rows, case.samples):
        assert all(first[row] == first[row + other] for other in range(case.samples))
    assert not any(one == other for one, other in zip(first, second, strict=True))
    assert {token for prompt in first for token in prompt} <= set(range(4, 64))


@pytest.mark.slow
def test_the_engine_is_measured_beside_a_bare_loop_and_its_log_probs_are_right(tmp_path: Path) -> None:
    words = ["--case", "quickstart", "--arm", "tidemill", "--arm", "bare-loop", "--rounds", "1", "--device", "cpu"]
    assert main([*words, "--json", str(tmp_path / "lines")]) == 0
    lines = [json.loads(line) for line in (tmp_path / "lines").read_text().splitlines()]
    assert {line["benchmark"] for line in lines} == {"rollout.transformers"}
    assert {(line["arm"], line["metric"]) for line in lines} == {
        (arm, metric) for arm in ("tidemill", "bare-loop") for metric in ("rate", "ratio", "mismatch")
    }
    assert all(line["verified"] and line["value"] > 0 for line in lines)
