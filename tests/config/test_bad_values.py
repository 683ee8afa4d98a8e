"""Bad values that other systems accepted, mapped to our settings: each is refused by name, or has a documented meaning.

Rows of kind I of the collection of real faults, and its list of bad values.
"""

from collections.abc import Callable
from pathlib import Path

import pytest

from tidemill.config.load import Loaded, SettingsError, load

Load = Callable[..., Loaded]

Problems = Callable[..., list[str]]

INTERVALS = ("checkpoint.every", "checkpoint.keep_every", "eval.every")

REFUSED = {
    "an interval is not a fraction": ("checkpoint.every=1.5", "checkpoint.every = 1.5", "valid integer"),
    "an interval is not text": ('checkpoint.every="5"', 'checkpoint.every = "5"', "valid integer, not text"),
    "an interval is not true": ("checkpoint.every=true", "checkpoint.every = true", "valid integer"),
    "an interval is not yes": ("checkpoint.every=yes", 'checkpoint.every = "yes"', "valid integer, not text"),
    "the only checkpoint is never deleted": ("checkpoint.keep_last=0", "checkpoint.keep_last = 0", "or equal to 1"),
    "a run has steps": ("steps=0", "steps = 0", "should be greater than 0"),
    "steps are not negative": ("steps=-5", "steps = -5", "should be greater than 0"),
    "a group has two answers": ("rollout.samples=1", "rollout.samples = 1", "it needs 2 or more"),
    "a learning rate is not text": ('trainer.optimizer.lr="1e-6"', 'lr = "1e-6"', "valid number, not text"),
    "a learning rate is finite": ("trainer.optimizer.lr=nan", "lr = nan", "finite number"),
    "a learning rate is not infinite": ("trainer.optimizer.lr=inf", "lr = inf", "finite number"),
    "YAML's nan is text": ("trainer.optimizer.lr=.nan", 'lr = ".nan"', "valid number, not text"),
    "a learning rate is not negative": ("trainer.optimizer.lr=-1e-6", "lr = -1e-06", "or equal to 0"),
    "training is not greedy": ("rollout.sampling.temperature=0", "temperature = 0", "set it above 0"),
    "a temperature is not negative": ("rollout.sampling.temperature=-1.0", "temperature = -1.0", "or equal to 0"),
    "top_p keeps something": ("rollout.sampling.top_p=0", "top_p = 0", "should be greater than 0"),
    "training keeps every token by probability": ("rollout.sampling.top_p=0.9", "top_p = 0.9", "needs top_p = 1"),
    "training keeps every token by rank": ("rollout.sampling.top_k=50", "top_k = 50", "needs top_k = 0"),
    "a misspelt setting is named": ("checkpoint.evry=5", "checkpoint.evry", "did you mean checkpoint.every?"),
    "an unknown section is named": ("rollouts={n=4}", "rollouts", "no such section; did you mean rollout?"),
    "a setting of another mode is refused": ("reward.pattern=x", "reward.pattern", "it belongs to regex"),
    "there are two kinds of KL in nothing": ("algorithm.kl_in_loss=0.1", "algorithm.kl_in_loss", "no such setting"),
    "a clip is not upside down": ("algorithm.clip_high=-0.2", "clip_high = -0.2", "or equal to 0"),
    "a clip leaves something": ("algorithm.clip_low=1.0", "clip_low = 1.0", "less than 1"),
    "a model is there": ("model=./does-not-exist", "does-not-exist", "there is no such folder"),
    "prompts are there": ("data.prompts=gone.jsonl", "gone.jsonl", "there is no such file"),
    "replayed rollouts are there": ("rollout.replay=./does-not-exist", "does-not-exist", "no such folder"),
    "replayed rollouts are not an empty folder": ("rollout.replay=empty", "empty", "holds no step-*.jsonl"),
    "replayed rollouts are not a file": ("rollout.replay=prompts.jsonl", "prompts.jsonl", "no such folder"),
    "a run is not written over its model": ("run.dir=model", "run.dir", "lies in the model folder"),
    "a run is not written into its model": ("run.dir=model/../model/runs", "run.dir", "lies in the model folder"),
    "a run folder is not a file": ("run.dir=prompts.jsonl/run", "run.dir", "is a file"),
    "a size has a known unit": ('residency.budget="12 bananas"', "residency.budget", "is not a size"),
    "a budget is not nothing": ("residency.budget=0", "residency.budget = 0", "a size above 0"),
    "a budget is not true": ("residency.budget=true", "residency.budget = true", "a size above 0"),
    "a page is not negative": ("residency.page=-1", "residency.page = -1", "greater than 0"),
    "spare memory is not negative": ("residency.spare=-1", "residency.spare = -1", '"auto" or a size'),
    "spare memory is not false": ("residency.spare=false", "residency.spare = false", '"auto" or a size'),
    "weights are compared in a known way": (
        "weights.verify=never",
        'weights.verify = "never"',
        '"always", "sampled" or "off"',
    ),
    "weights take turns of two or more": ("weights.verify_within=1", "verify_within = 1", "or equal to 2"),
    "weights have their turn some day": ("weights.verify_within=1001", "verify_within = 1001", "or equal to 1000"),
    "a mismatch is not nothing": ("rollout.max_mismatch=0", "max_mismatch = 0", '"off" or nats above 0'),
    "a mismatch is a number": ("rollout.max_mismatch=nan", "max_mismatch = nan", '"off" or nats above 0'),
    "a mismatch is not larger than numbers are": (
        f"rollout.max_mismatch=1{'0' * 400}",
        "max_mismatch = 1",
        '"off" or nats above 0',
    ),
    "a mismatch is not true": ("rollout.max_mismatch=true", "max_mismatch = true", '"off" or nats above 0'),
    "a mismatch that is allowed has a known name": ("rollout.max_mismatch=none", "max_mismatch", '"auto", "off" or'),
    "a wait ends within a year": ("residency.deadline=1e12", "residency.deadline", "longer than a year; write seconds"),
    "no call waits for ever": ("reward={use='regex',pattern='x',timeout=4e7}", "timeout", "seconds, 31536000 at most"),
    "one process trains": ("trainer.ranks=2", "trainer.ranks = 2", 'set cluster.use = "ray"'),
    "one process answers": ("engine.replicas=2", "engine.replicas = 2", 'set cluster.use = "ray"'),
    "a replica is one at least": ("engine.replicas=0", "engine.replicas = 0", "a whole number above 0"),
    "copies divide the ranks": ("trainer.replicas=2", "trainer.replicas = 2", "1 ranks do not divide"),
    "an address has a port": ('cluster={use="ray", address="head"}', "cluster.address", "match"),
    "an address is no URL": ('cluster={use="ray", address="ray://head:10001"}', "cluster.address", "match"),
    "a replica is restarted or not": ('cluster={use="ray", restarts=-1}', "cluster.restarts", "greater than or equal"),
    "a placement is known": ('cluster={use="ray", placement="split"}', "cluster.placement", "colocated"),
}


@pytest.mark.parametrize("row", REFUSED.values(), ids=REFUSED)
def test_a_bad_value_is_refused_by_name(problems: Problems, folder: Path, row: tuple[str, str, str]) -> None:
    (folder / "empty").mkdir()
    word, named, reason = row
    found = problems(word)
    assert len(found) == 1, found
    assert named in found[0] and reason in found[0]


@pytest.mark.parametrize("path", INTERVALS)
def test_every_interval_has_the_same_rule(problems: Problems, loaded: Load, folder: Path, path: str) -> None:
    (folder / "held_out.jsonl").write_text('{"prompt": "2 + 2 ="}\n')
    for wrong in ("-1", "1.5", '"5"', "true"):
        assert any(line.startswith(f"{path} = {wrong} ") for line in problems(f"{path}={wrong}")), wrong
    assert loaded(f"{path}=0").origins[path] == "command line"
    assert problems("eval.data=held_out.jsonl", f"{path}=50") == []


def test_a_learning_rate_needs_no_dot_and_may_be_written_with_a_capital(loaded: Load) -> None:
    assert loaded("trainer.optimizer.lr=1e-6").config.trainer.optimizer.lr == 1e-6
    assert loaded("trainer.optimizer.lr=1E-6").config.trainer.optimizer.lr == 1e-6


def test_a_whole_number_is_a_learning_rate(loaded: Load) -> None:
    assert loaded("trainer.optimizer.lr=0").config.trainer.optimizer.lr == 0


def test_a_tiny_learning_rate_in_bfloat16_is_allowed(loaded: Load) -> None:
    assert loaded("trainer.dtype=bfloat16", "trainer.optimizer.lr=1e-9").config.trainer.dtype == "bfloat16"


def test_a_batch_that_is_too_small_is_refused_with_its_numbers(problems: Problems) -> None:
    (found,) = problems("rollout.prompts=2", "rollout.samples=8", "trainer.minibatches=256")
    assert "rollout.prompts = 2 times rollout.samples = 8 is 16 answers" in found and "256 minibatches" in found


def test_a_batch_that_does_not_divide_is_refused_with_its_numbers(problems: Problems) -> None:
    (found,) = problems("rollout.prompts=3", "rollout.samples=4", "trainer.minibatches=8")
    assert "is 12 answers a step, which do not divide into 8 minibatches" in found


def test_greedy_and_narrow_sampling_are_fine_where_nothing_is_trained(loaded: Load) -> None:
    narrow = ("rollout.sampling.temperature=0", "rollout.sampling.top_p=0.9", "rollout.sampling.top_k=5")
    assert loaded(*narrow, "rollout.samples=1", training=False).config.rollout.sampling.top_k == 5
    assert loaded("eval.temperature=0").config.eval.temperature == 0


def test_relative_folders_are_made_absolute_once_against_the_folder_of_the_command(folder: Path) -> None:
    (folder / "elsewhere").mkdir()
    (folder / "elsewhere" / "run.toml").write_text((folder / "run.toml").read_text())
    config = load([Path("elsewhere/run.toml")], ["rollout.replay="], check_files=True).config
    assert config.model == folder / "model"
    assert config.data.prompts == folder / "prompts.jsonl"
    assert config.run.dir == folder / "runs/first"


def test_a_stored_config_means_the_same_in_another_folder(loaded: Load, tmp_path: Path, monkeypatch) -> None:
    config = loaded("rollout.replay=x", "eval.data=y", "reward.use=my/score.py:f", check_files=False).config
    (tmp_path / "other").mkdir()
    monkeypatch.chdir(tmp_path / "other")
    assert type(config).from_json(config.to_json()) == config


def test_the_home_sign_is_expanded(loaded: Load, folder: Path, monkeypatch) -> None:
    monkeypatch.setenv("HOME", str(folder / "home"))
    assert loaded("run.dir=~/out").config.run.dir == folder / "home" / "out"


def test_the_home_of_nobody_is_a_problem(problems: Problems) -> None:
    (found,) = problems("run.dir=~nobody-has-this-name/out")
    assert "there is no such user" in found


def test_a_run_folder_reached_through_a_link_into_the_model_is_refused(problems: Problems, folder: Path) -> None:
    (folder / "link").symlink_to(folder / "model")
    (found,) = problems("run.dir=link/run")
    assert "lies in the model folder" in found


def test_every_option_that_a_chosen_mode_would_not_read_is_refused(problems: Problems) -> None:
    dead = {
        "trainer.schedule.min_ratio=0.1": "has no effect",
        "recorder.wandb.project=mine": "has no effect",
        "checkpoint.keep_every=75": "not every multiple of it is saved",
        "eval.samples=4": "greedy answers",
        "eval.every=5": "set eval.data",
        "warm_up.steps=5": "set warm_up.data",
    }
    for word, reason in dead.items():
        (found,) = problems(word)
        assert reason in found, word
    (found,) = problems("residency.offload=always", 'residency.budget="1 GiB"')
    assert "has no effect" in found
    (found,) = problems("trainer.offload=never", 'residency.budget="1 GiB"')
    assert 'has no effect with trainer.offload = "never"' in found
    (found,) = problems("reward.timeout=3")
    assert found.endswith('no such setting with reward.use = "exact_match"; it belongs to regex and module:function')


def test_trainer_and_engine_do_not_ask_for_opposite_budgets(problems: Problems) -> None:
    assert problems("trainer.offload=always", "engine.offload=auto", "residency.offload=never") == []
    (found,) = problems("trainer.offload=always", "engine.offload=never")
    assert 'contradicts trainer.offload = "always"' in found


def test_one_message_holds_the_problems_of_types_rules_and_files(problems: Problems) -> None:
    found = problems("steps=true", "model=gone", "rollout.samples=1", "stpes=3")
    assert [line.split(" ")[0].rstrip(":") for line in found] == ["steps", "stpes", "rollout.samples", "model"]


def test_a_problem_is_not_reported_twice_because_a_rule_reads_a_bad_value(problems: Problems) -> None:
    assert len(problems("rollout.samples=0", "trainer.minibatches=7")) == 1
    assert len(problems("warm_up.steps=20", "steps=0")) == 2  # steps, and demonstrations that are missing


def test_problems_pickle(loaded: Load) -> None:
    import pickle

    with pytest.raises(SettingsError) as caught:
        loaded("steps=0")
    again = pickle.loads(pickle.dumps(caught.value))
    assert str(again) == str(caught.value) and again.problems[0].path == "steps"
