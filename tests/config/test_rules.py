"""Contradictions between sections, each refused before anything is started.

`tidemill.config.rules`, `tidemill.config.residency_rules`, `tidemill.config.checkpoint_rules`,
`tidemill.config.findings`.
"""

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from tidemill.config import checkpoint_rules, files, residency_rules, rules
from tidemill.config.load import Loaded

Load = Callable[..., Loaded]

Problems = Callable[..., list[str]]


@pytest.fixture(autouse=True)
def data(folder: Path) -> None:
    (folder / "held_out.jsonl").write_text('{"prompt": "2 + 2 ="}\n')
    (folder / "kept").mkdir()
    (folder / "kept" / "step-00000001.jsonl").write_text("{}\n")


def test_every_rule_is_run_and_is_a_sentence() -> None:
    found = (vars(rules) | vars(residency_rules) | vars(checkpoint_rules)).items()
    written = {name for name, value in found if callable(value) and name.islower() and name[0] != "_"}
    listed = {rule.__name__ for rule in rules.TRAINING_RULES}
    assert written - {"sinks"} == listed
    assert set(rules.RULES) <= set(rules.TRAINING_RULES)
    assert all(name.count("_") >= 1 for name in listed)


def test_warm_up_is_part_of_the_run(problems: Problems, loaded: Load) -> None:
    assert loaded("warm_up.steps=10", "warm_up.data=held_out.jsonl").config.warm_up.steps == 10
    (found,) = problems("warm_up.steps=11", "warm_up.data=held_out.jsonl")
    assert "part of the run's steps = 10" in found


def test_a_warm_up_step_divides_into_minibatches(problems: Problems) -> None:
    words = ("trainer.minibatches=4", "warm_up.batch=6")
    assert problems(*words) == []
    (found,) = problems(*words, "warm_up.steps=5", "warm_up.data=held_out.jsonl")
    assert "6 demonstrations a step do not divide into trainer.minibatches = 4" in found


def test_copies_of_the_model_divide_the_ranks(problems: Problems) -> None:
    words = ("trainer.ranks=4", 'cluster.use="ray"')
    assert not [text for text in problems(*words, "trainer.replicas=2") if text.startswith("trainer.replicas")]
    (found,) = (text for text in problems(*words, "trainer.replicas=3") if text.startswith("trainer.replicas"))
    assert "4 ranks do not divide into 3 copies" in found


@pytest.mark.parametrize("word", ["eval.every=5", "eval.before_training=true"])
def test_evaluation_needs_prompts_and_an_engine(problems: Problems, word: str) -> None:
    path = word.partition("=")[0]
    assert problems(word, "eval.data=held_out.jsonl") == []
    (found,) = problems(word)
    assert found.startswith(path) and "set eval.data" in found
    (found,) = problems(word, "eval.data=held_out.jsonl", "rollout.replay=kept")
    assert found.startswith(path) and "builds no engine" in found


def test_a_replay_may_leave_engine_settings_and_held_out_data_as_they_are(problems: Problems) -> None:
    assert problems("rollout.replay=kept", "engine.max_batch=3", "eval.data=held_out.jsonl") == []


def test_a_replay_is_not_written_over(problems: Problems) -> None:
    assert problems("rollout.replay=kept", "rollout.dump=true") == []
    (found,) = problems("rollout.replay=kept", "rollout.dump=true", "run.dir=.")
    assert "would write over the rollouts that are replayed" in found


def test_kept_checkpoints_are_among_the_saved(problems: Problems) -> None:
    assert problems("checkpoint.every=50", "checkpoint.keep_every=100") == []
    (found,) = problems("checkpoint.every=0", "checkpoint.keep_every=100")
    assert "with checkpoint.every = 0" in found


def test_exported_steps_are_among_the_saved(problems: Problems) -> None:
    assert problems("checkpoint.every=50", "checkpoint.export_every=100") == []
    assert problems("checkpoint.every=0", "checkpoint.export_every=0") == []
    for every in (0, 40):
        (found,) = problems(f"checkpoint.every={every}", "checkpoint.export_every=100", "checkpoint.at_epoch_end=true")
        assert f"with checkpoint.every = {every}, and what is exported is a save; make it a multiple" in found
        assert "checkpoint.export_every" in found


def test_the_best_checkpoint_is_one_of_several_that_have_a_number(problems: Problems) -> None:
    assert problems("checkpoint.every=5", "checkpoint.keep_best=reward/mean") == []
    (found,) = problems("checkpoint.every=0", "checkpoint.keep_best=reward/mean")
    assert "only the end is saved" in found
    assert problems("checkpoint.every=0", "checkpoint.at_epoch_end=true", "checkpoint.keep_best=-policy/loss") == []
    for name in ("-", " reward/mean", "- x"):
        (found,) = problems(f'checkpoint.keep_best="{name}"')
        assert "is no name of a number" in found


def test_a_best_by_evaluation_needs_steps_that_are_saved_and_evaluated(problems: Problems) -> None:
    best = "checkpoint.keep_best=eval/reward"
    (found,) = problems(best)
    assert "no step between start and end is evaluated" in found
    evaluated = (best, "eval.data=held_out.jsonl", "eval.every=4")
    assert problems(*evaluated, "checkpoint.every=2") == []
    (found,) = problems(*evaluated, "checkpoint.every=3")
    assert "no step up to steps = 10 is both saved (checkpoint.every = 3) and evaluated (eval.every = 4)" in found
    assert problems(*evaluated, "checkpoint.every=3", "checkpoint.at_epoch_end=true") == []


def test_what_a_resume_accepts_is_something_that_a_checkpoint_is_bound_to(problems: Problems) -> None:
    assert problems('checkpoint.accept=["model", "tokenizer", "data", "algorithm", "warm_up", "seed"]') == []
    (found,) = problems('checkpoint.accept=["Dta", "seed"]')
    assert found.endswith('"Dta" is no change that a resume can accept; did you mean "data"?')
    (found,) = problems('checkpoint.accept=["everything"]')
    assert "the names are model, tokenizer, data, algorithm, warm_up, seed" in found


def test_a_default_that_takes_part_in_a_contradiction_is_called_default(problems: Problems) -> None:
    (found,) = problems("trainer.minibatches=5")
    assert found.startswith("trainer.minibatches = 5 (command line)")
    (found,) = problems('recorder.wandb.mode="offline"')
    assert found.startswith('recorder.use = ["rich"] (default)')


def test_the_model_folder_may_lie_in_the_run_folder(problems: Problems) -> None:
    assert problems("run.dir=.") == []


def test_checks_of_files_are_listed_too() -> None:
    assert set(files.CHECKS) <= set(files.TRAINING_CHECKS)


def test_several_processes_have_a_cluster(problems: Problems) -> None:
    words = ("trainer.ranks=2", "engine.replicas=2")
    assert problems(*words, "cluster.use=ray") == []
    ranks, replicas = problems(*words)
    assert ranks.startswith("trainer.ranks = 2") and replicas.startswith("engine.replicas = 2")


def test_trainer_and_engine_on_devices_of_their_own_share_no_budget(problems: Problems) -> None:
    words = ("cluster.use=ray", "cluster.placement=separate")
    assert problems(*words) == []
    assert problems(*words, "residency.offload=never") == []
    for word in ("residency.offload=always", "trainer.offload=always", 'residency.budget="1 GiB"'):
        (found,) = problems(*words, word)
        assert found.startswith(word.partition("=")[0]) and "both stay awake" in found


def test_addresses_are_kept_on_gpus_only(problems: Problems) -> None:
    assert problems("trainer.keep_addresses=true") == []
    assert problems("trainer.keep_addresses=true", "run.device=cuda") == []
    (found,) = problems("trainer.keep_addresses=true", "run.device=cpu")
    assert found.startswith("trainer.keep_addresses = true (command line)")
    assert found.endswith('set it to false, or run.device = "cuda"')


@pytest.mark.parametrize(
    ("words", "numbers"),
    [
        (["rollout.prompts=1", "rollout.samples=4"], "= 1 times rollout.samples = 4 answers in .* 1 parts, which is 4"),
        (["trainer.minibatches=16"], "16 parts, which is 4, fewer than the 6 ranks; lower it to 4"),
        (
            ["warm_up.steps=5", "warm_up.data=held_out.jsonl", "warm_up.batch=5"],
            "warm_up.batch = 5 demonstrations in .* 1 parts, which is 5, fewer than the 6 ranks",
        ),
    ],
)
def test_more_ranks_than_rows_are_refused_with_the_numbers(problems: Problems, words: list[str], numbers: str) -> None:
    assert problems("cluster.use=ray", "trainer.ranks=4", *words) == []
    (found,) = problems("cluster.use=ray", "trainer.ranks=6", *words)
    assert found.startswith("trainer.ranks = 6") and re.search(numbers, found)


def test_groups_of_a_trainer_that_never_sleeps_cannot_be_asked_to_go(problems: Problems) -> None:
    asked = ("residency.park_groups=always", "cluster.use=ray")
    assert problems(*asked, "trainer.ranks=2") == []
    assert problems(*asked, "trainer.ranks=2", "residency.offload=never", "trainer.offload=always") == []
    assert problems(*asked, "trainer.ranks=1") == []
    for word in ("residency.offload=never", "engine.offload=never", "cluster.placement=separate"):
        (found,) = problems(*asked, "trainer.ranks=2", word)
        assert found.startswith('residency.park_groups = "always" (command line)') and "has no effect with" in found
        assert word.partition("=")[0] in found
    assert problems("residency.park_groups=never") == []
