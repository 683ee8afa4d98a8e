"""Faults of kind C that are of data and schedules: C02, C03, C05, C10, C14 and C17, over whole runs."""

from pathlib import Path

import pytest
from tests.checkpoint.real_runs import QUICK, STOPPED, checkpoint_of, groups_of, notices, rows_of, started, steps_of
from tests.residency.real_run import prepare_learning

from tidemill.trainers.common.schedule import PhaseSettings, learning_rate

FOUR = (*QUICK, "rollout.prompts=4")


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("kind c")
    prepare_learning(folder)
    lines = (folder / "rows.jsonl").read_text().splitlines()
    for count in (8, 10):
        (folder / f"{count}.jsonl").write_text("\n".join(lines[:count]) + "\n")
    return folder


def keys_of(run: Path, steps: range) -> list[list[str]]:
    """Epoch and id of every prompt, in order, by step."""
    return [[group.prompt.key for group in groups_of(run, step)] for step in steps]


def uninterrupted(base: Path, rows: int) -> Path:
    run = base / f"whole {rows}"
    if not run.exists():
        assert started(base, run, f"data.prompts={base / f'{rows}.jsonl'}", "steps=6", *FOUR) == 0
    return run


@pytest.mark.parametrize("saved", [2, 4])
def test_c02_a_run_saved_where_an_epoch_ends_goes_on_with_the_next_and_does_all_its_steps(
    base: Path, saved: int
) -> None:
    """C02: 8 prompts, 4 a step."""
    run, rows = base / f"epoch's end {saved}", f"data.prompts={base / '8.jsonl'}"
    assert started(base, run, rows, f"steps={saved}", *FOUR) == 0
    assert started(base, run, rows, "steps=6", *FOUR) == 0
    assert steps_of(run) == list(range(6))
    found = keys_of(run, range(6))
    assert found == keys_of(uninterrupted(base, 8), range(6))
    assert [{key.partition(":")[0] for key in keys} for keys in found] == [{"0"}] * 2 + [{"1"}] * 2 + [{"2"}] * 2


def test_c03_a_run_saved_in_its_second_epoch_is_in_it_after_the_resume_under_the_same_shuffle(base: Path) -> None:
    """C03: and the second epoch's order is not the first one's."""
    run, rows = base / "second epoch", f"data.prompts={base / '8.jsonl'}"
    assert started(base, run, rows, "steps=3", *FOUR) == 0
    assert started(base, run, rows, "steps=6", *FOUR) == 0
    first, second = keys_of(run, range(2)), keys_of(run, range(2, 4))
    assert [second, keys_of(run, range(4, 6))] == [
        keys_of(uninterrupted(base, 8), range(2, 4)),
        keys_of(uninterrupted(base, 8), range(4, 6)),
    ]
    without = [[key.partition(":")[2] for keys in epoch for key in keys] for epoch in (first, second)]
    assert without[0] != without[1] and sorted(without[0]) == sorted(without[1])


def test_c05_no_prompt_of_the_steps_before_the_save_comes_again_in_its_epoch(base: Path) -> None:
    """C05: saved at 1 of 2 steps of an epoch."""
    run, rows = base / "no prompt again", f"data.prompts={base / '8.jsonl'}"
    assert started(base, run, rows, "steps=1", *FOUR) == 0
    assert started(base, run, rows, "steps=2", *FOUR) == 0
    before, after = keys_of(run, range(2))
    assert len({*before, *after}) == 8


def test_c17_an_epoch_that_no_number_of_steps_divides_loses_no_prompt_wherever_it_is_saved(base: Path) -> None:
    """C17: 10 prompts, 4 a step in two minibatches; saved after each update, and started anew after each."""
    run, words = base / "ten", (f"data.prompts={base / '10.jsonl'}", "trainer.minibatches=2", *FOUR)
    for steps in range(1, 7):
        assert started(base, run, f"steps={steps}", *words) == 0
    found = keys_of(run, range(6))
    assert found == keys_of(uninterrupted(base, 10), range(6))
    flat = [key for keys in found for key in keys]
    for epoch in range(2):
        assert len({key for key in flat if key.startswith(f"{epoch}:")}) == 10
    assert len(flat) == len(set(flat)) == 24


def rates_of(run: Path) -> list[float]:
    return [line["policy/lr"] for line in rows_of(run) if line["kind"] == "metrics"]


def test_c10_a_schedule_goes_over_a_resume_as_over_any_step_and_another_total_is_told_and_followed(base: Path) -> None:
    """C10: warm-up 3, decay to 10, stopped at 4; also with total 20."""
    words = ("trainer.schedule.kind=cosine", "trainer.schedule.warm_up_steps=3", *QUICK)
    whole, run, longer = (base / f"schedule {name}" for name in ("whole", "stopped", "longer"))
    assert started(base, whole, "steps=10", *words) == 0
    for folder in (run, longer):
        assert started(base, folder, "steps=10", *words, faults="weights.publish=stop@4") == STOPPED
    assert started(base, run, "steps=10", *words) == 0
    assert rates_of(run) == rates_of(whole)
    assert len(set(rates_of(run))) > 8
    assert started(base, longer, "steps=20", *words) == 0
    done = len([rate for rate in rates_of(longer)[:10] if rate in rates_of(whole)])
    new = PhaseSettings(
        lr=1e-3, betas=(0.9, 0.95), eps=1e-8, weight_decay=0, schedule="cosine", warm_up_steps=3, min_ratio=0.0,
        total_steps=20,
    )  # fmt: skip
    stopped = next(int(text.rpartition("step ")[2].split()[0]) for text in notices(longer) if "learning rate" in text)
    assert 3 <= stopped <= done
    assert rates_of(longer)[:stopped] == rates_of(whole)[:stopped]
    assert rates_of(longer)[stopped:] == pytest.approx([learning_rate(new, step) for step in range(stopped, 20)])
    assert any("now falls until step 20 of phase rl, no longer until 10" in text for text in notices(longer))


def test_c14_what_was_rolled_out_after_the_save_is_made_anew_by_the_policy_that_learns_from_it(base: Path) -> None:
    """C14: there is no buffer yet; what lies in the run folder of steps that are made again is replaced."""
    run = base / "no old rollouts"
    assert started(base, run, "steps=5", "checkpoint.every=3", *QUICK) == 0
    (checkpoint_of(run, 5)).rename(base / "taken away")
    assert started(base, run, "steps=6", *QUICK) == 0
    versions = [
        {
            (member.version.step, member.version.attempt)
            for group in groups_of(run, step)
            for member in group.trajectories
        }
        for step in range(6)
    ]
    assert versions == [{(step, 1 if step < 3 else 2)} for step in range(6)]
