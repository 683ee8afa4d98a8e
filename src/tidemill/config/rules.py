"""What settings must agree on with each other. Each rule is a function named as a sentence that holds.

A rule looks at values only, never at the disk, and yields what contradicts it. `RULES` hold for every use of settings,
`TRAINING_RULES` for a run that trains.
"""

import os
from collections.abc import Iterator
from pathlib import Path

from pydantic_core import PydanticCustomError

from tidemill.config.checkpoint_rules import CHECKPOINT_RULES
from tidemill.config.findings import Finding, Rule
from tidemill.config.recorder import WandbSettings
from tidemill.config.registry import sinks
from tidemill.config.residency_rules import RESIDENCY_RULES
from tidemill.config.run import RunConfig

__all__ = ["RULES", "TRAINING_RULES"]


def _lies_in(path: Path, folder: Path) -> bool:
    """Whether `path` is `folder` or below it, through links too. A circle of links is no error here."""
    return Path(os.path.realpath(path)).is_relative_to(os.path.realpath(folder))


def training_explores(config: RunConfig) -> Iterator[Finding]:
    """Greedy answers to one prompt are all the same, so no group has anything to compare."""
    if config.rollout.sampling.temperature == 0:
        yield Finding(
            ("rollout.sampling.temperature",),
            "greedy answers to a prompt are all the same, so there is nothing to learn from; set it above 0 "
            "(eval.temperature = 0 is fine)",
        )


def training_samples_from_all_tokens(config: RunConfig) -> Iterator[Finding]:
    """The trainer normalises over all tokens; the ratio to an engine that did not would be wrong."""
    sampling = config.rollout.sampling
    why = "the trainer's probabilities are over all tokens, so importance ratios would be wrong"
    if sampling.top_p < 1:
        yield Finding(("rollout.sampling.top_p",), f"{why}; training needs top_p = 1")
    if sampling.top_k > 0:
        yield Finding(("rollout.sampling.top_k",), f"{why}; training needs top_k = 0")


def a_group_has_enough_answers(config: RunConfig) -> Iterator[Finding]:
    """A group of one has no mean to differ from."""
    least = type(config.algorithm).least_samples
    if config.rollout.samples < least:
        yield Finding(
            ("rollout.samples", "algorithm.use"),
            f"{config.algorithm.use} compares the answers to one prompt with each other; it needs {least} or more",
        )


def several_processes_need_a_cluster(config: RunConfig) -> Iterator[Finding]:
    """Inline there is one process."""
    asked = {"trainer.ranks": config.trainer.ranks, "engine.replicas": config.engine.replicas}
    for path, count in asked.items() if config.cluster.use == "inline" else ():
        if isinstance(count, int) and count > 1:
            yield Finding((path, "cluster.use"), 'needs several processes; set cluster.use = "ray", or this to 1')


def servers_elsewhere_are_counted_by_their_addresses(config: RunConfig) -> Iterator[Finding]:
    """An option that would do nothing is refused."""
    if type(config.engine).elsewhere and config.engine.replicas != "auto":
        yield Finding(
            ("engine.replicas", "engine.urls"),
            f'has no effect with engine.use = "{config.engine.use}": there is one replica for each address; drop it',
        )


def copies_of_the_model_divide_the_ranks(config: RunConfig) -> Iterator[Finding]:
    """Every copy is cut over equally many ranks."""
    ranks, replicas = config.trainer.ranks, config.trainer.replicas
    if ranks % replicas:
        yield Finding(
            ("trainer.replicas", "trainer.ranks"),
            f"{ranks} ranks do not divide into {replicas} copies of the model; choose a divisor of trainer.ranks",
        )


def every_rank_has_answers(config: RunConfig) -> Iterator[Finding]:
    """A rank without any would compute nothing, update after update. None at all is for another rule."""
    ranks, minibatches, rollout = config.trainer.ranks, config.trainer.minibatches, config.rollout
    answers = rollout.prompts * rollout.samples // minibatches
    if config.steps > config.warm_up.steps and 0 < answers < ranks:
        yield Finding(
            ("trainer.ranks", "rollout.prompts", "rollout.samples", "trainer.minibatches"),
            f"an update has rollout.prompts = {rollout.prompts} times rollout.samples = {rollout.samples} answers in "
            f"trainer.minibatches = {minibatches} parts, which is {answers}, fewer than the {ranks} ranks; lower it to "
            f"{answers}, or sample more",
        )


def every_rank_has_demonstrations(config: RunConfig) -> Iterator[Finding]:
    """The same for supervised steps."""
    ranks, minibatches, warm_up = config.trainer.ranks, config.trainer.minibatches, config.warm_up
    rows = warm_up.batch // minibatches
    if warm_up.steps and 0 < rows < ranks:
        yield Finding(
            ("trainer.ranks", "warm_up.batch", "trainer.minibatches"),
            f"a supervised update has warm_up.batch = {warm_up.batch} demonstrations in trainer.minibatches = "
            f"{minibatches} parts, which is {rows}, fewer than the {ranks} ranks; lower it to {rows}, or raise "
            "warm_up.batch",
        )


def minibatches_divide_a_step(config: RunConfig) -> Iterator[Finding]:
    """No answer is dropped, and no update is made from none."""
    rollout, minibatches = config.rollout, config.trainer.minibatches
    answers = rollout.prompts * rollout.samples
    if answers % minibatches:
        yield Finding(
            ("trainer.minibatches", "rollout.prompts", "rollout.samples"),
            f"rollout.prompts = {rollout.prompts} times rollout.samples = {rollout.samples} is {answers} answers a "
            f"step, which do not divide into {minibatches} minibatches",
        )


def minibatches_divide_a_warm_up_step(config: RunConfig) -> Iterator[Finding]:
    """The same for demonstrations."""
    warm_up, minibatches = config.warm_up, config.trainer.minibatches
    if warm_up.steps and warm_up.batch % minibatches:
        yield Finding(
            ("warm_up.batch", "trainer.minibatches", "warm_up.steps"),
            f"{warm_up.batch} demonstrations a step do not divide into trainer.minibatches = {minibatches}",
        )


def warm_up_fits_into_the_run(config: RunConfig) -> Iterator[Finding]:
    """Supervised steps are part of `steps`."""
    if config.warm_up.steps > config.steps:
        yield Finding(
            ("warm_up.steps", "steps"),
            f"supervised steps are part of the run's steps = {config.steps}; lower it, or raise steps",
        )


def warm_up_has_demonstrations(config: RunConfig) -> Iterator[Finding]:
    """Supervised steps need data."""
    if config.warm_up.steps and config.warm_up.data is None:
        yield Finding(("warm_up.steps", "warm_up.data"), "needs demonstrations; set warm_up.data, or set it to 0")


def evaluation_has_prompts(config: RunConfig) -> Iterator[Finding]:
    """Evaluation needs data."""
    asked = {"eval.every": config.eval.every > 0, "eval.before_training": config.eval.before_training}
    for path in (path for path, wanted in asked.items() if wanted and config.eval.data is None):
        yield Finding((path, "eval.data"), "needs held-out prompts; set eval.data")


def greedy_evaluation_asks_once(config: RunConfig) -> Iterator[Finding]:
    """Greedy answers to one prompt are all the same."""
    if config.eval.temperature == 0 and config.eval.samples > 1:
        yield Finding(
            ("eval.samples", "eval.temperature"),
            "greedy answers to a prompt are all the same; set it to 1, or eval.temperature above 0",
        )


def a_replay_needs_no_engine(config: RunConfig) -> Iterator[Finding]:
    """Replaying builds no engine, so nothing can be evaluated."""
    asked = {"eval.every": config.eval.every > 0, "eval.before_training": config.eval.before_training}
    for path in (path for path, wanted in asked.items() if wanted and config.rollout.replay is not None):
        yield Finding(
            (path, "rollout.replay"),
            "rollout.replay builds no engine, so nothing can be evaluated; turn this off, or generate",
        )


def a_replay_is_not_written_over(config: RunConfig) -> Iterator[Finding]:
    """Dumping into the folder that is being read would destroy it."""
    replay, folder = config.rollout.replay, config.run.dir
    if config.rollout.dump and replay is not None and _lies_in(replay, folder):
        yield Finding(
            ("rollout.dump", "rollout.replay", "run.dir"),
            f"would write over the rollouts that are replayed from {replay}; choose another run.dir",
        )


def a_constant_rate_has_no_end(config: RunConfig) -> Iterator[Finding]:
    """An option that would do nothing is refused."""
    schedules = {"trainer.schedule": config.trainer.schedule, "warm_up.schedule": config.warm_up.schedule}
    for path, schedule in schedules.items():
        if schedule.kind == "constant" and schedule.min_ratio:
            yield Finding(
                (f"{path}.min_ratio", f"{path}.kind"),
                f'has no effect with {path}.kind = "constant"; choose linear or cosine',
            )


def the_run_folder_is_not_in_the_model(config: RunConfig) -> Iterator[Finding]:
    """A run must not write over its base."""
    if _lies_in(config.run.dir, config.model):
        yield Finding(
            ("run.dir", "model"),
            f"lies in the model folder {config.model}, which a run must not write to; choose another",
        )


def recorders_are_known(config: RunConfig) -> Iterator[Finding]:
    """Every name in `recorder.use` is one."""
    for use in config.recorder.use:
        try:
            sinks(config.recorder.model_copy(update={"use": (use,)}))
        except PydanticCustomError as error:
            yield Finding(("recorder.use",), f'"{use}": {error.message()}')


def weights_and_biases_is_used_when_it_is_set_up(config: RunConfig) -> Iterator[Finding]:
    """An option that would do nothing is refused."""
    if "wandb" not in config.recorder.use and config.recorder.wandb != WandbSettings():
        yield Finding(
            ("recorder.use", "recorder.wandb"),
            'recorder.wandb has no effect without "wandb" in it; add it, or drop the table',
        )


RULES: tuple[Rule, ...] = (
    recorders_are_known,
    weights_and_biases_is_used_when_it_is_set_up,
    several_processes_need_a_cluster,
    servers_elsewhere_are_counted_by_their_addresses,
)
TRAINING_RULES: tuple[Rule, ...] = (
    *RULES,
    training_explores,
    training_samples_from_all_tokens,
    a_group_has_enough_answers,
    copies_of_the_model_divide_the_ranks,
    every_rank_has_answers,
    every_rank_has_demonstrations,
    minibatches_divide_a_step,
    minibatches_divide_a_warm_up_step,
    warm_up_fits_into_the_run,
    warm_up_has_demonstrations,
    evaluation_has_prompts,
    greedy_evaluation_asks_once,
    a_replay_needs_no_engine,
    a_replay_is_not_written_over,
    *CHECKPOINT_RULES,
    a_constant_rate_has_no_end,
    *RESIDENCY_RULES,
    the_run_folder_is_not_in_the_model,
)
