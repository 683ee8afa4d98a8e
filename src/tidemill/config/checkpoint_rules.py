"""What settings must agree on where checkpoints are saved, kept and resumed from."""

import difflib
import math
from collections.abc import Iterator

from tidemill.config.checkpoint import ACCEPTABLE
from tidemill.config.findings import Finding, Rule
from tidemill.config.run import RunConfig

__all__ = ["CHECKPOINT_RULES"]


def kept_checkpoints_are_saved_ones(config: RunConfig) -> Iterator[Finding]:
    """`keep_every` picks among the steps that are saved, whatever the number of rows."""
    every, keep = config.checkpoint.every, config.checkpoint.keep_every
    if keep and (every == 0 or keep % every):
        yield Finding(
            ("checkpoint.keep_every", "checkpoint.every"),
            f"not every multiple of it is saved with checkpoint.every = {every}; make it a multiple of that, or 0",
        )


def exported_steps_are_saved_ones(config: RunConfig) -> Iterator[Finding]:
    """`export_every` picks among the steps that are saved, whatever the number of rows: an export is of a save."""
    every, export = config.checkpoint.every, config.checkpoint.export_every
    if export and (every == 0 or export % every):
        yield Finding(
            ("checkpoint.export_every", "checkpoint.every"),
            f"not every multiple of it is saved with checkpoint.every = {every}, and what is exported is a save; make "
            "it a multiple of that, or 0",
        )


def accepted_changes_are_known(config: RunConfig) -> Iterator[Finding]:
    """A name that stands for nothing would accept nothing."""
    for name in config.checkpoint.accept:
        if name in ACCEPTABLE:
            continue
        close = difflib.get_close_matches(name.lower(), ACCEPTABLE, n=1)
        meant = f'did you mean "{close[0]}"?' if close else f"the names are {', '.join(ACCEPTABLE)}"
        yield Finding(("checkpoint.accept",), f'"{name}" is no change that a resume can accept; {meant}')


def the_best_checkpoint_is_one_of_several(config: RunConfig) -> Iterator[Finding]:
    """`keep_best` picks among the steps that are saved, by a number that has a name."""
    settings = config.checkpoint
    if not settings.keep_best:
        return
    if (
        settings.keep_best.removeprefix("-") != settings.keep_best.removeprefix("-").strip()
        or settings.keep_best == "-"
    ):
        yield Finding(
            ("checkpoint.keep_best",), f'"{settings.keep_best}" is no name of a number; write it as in metrics.jsonl'
        )
    if settings.every == 0 and not settings.at_epoch_end:
        yield Finding(
            ("checkpoint.keep_best", "checkpoint.every", "checkpoint.at_epoch_end"),
            "only the end is saved with checkpoint.every = 0, so there is nothing to choose from; set checkpoint.every "
            "or checkpoint.at_epoch_end, or drop it",
        )


def the_best_by_an_evaluation_is_evaluated(config: RunConfig) -> Iterator[Finding]:
    """A step that is never evaluated has no number to be best by."""
    settings, evaluation = config.checkpoint, config.eval
    if not settings.keep_best.removeprefix("-").startswith("eval/"):
        return
    if evaluation.data is None or evaluation.every == 0 or config.rollout.replay is not None:
        yield Finding(
            ("checkpoint.keep_best", "eval.every", "eval.data", "rollout.replay"),
            "no step between start and end is evaluated; set eval.data and eval.every, or choose a number of training, "
            'such as "reward/mean"',
        )
    elif settings.every and not settings.at_epoch_end and math.lcm(settings.every, evaluation.every) > config.steps:
        yield Finding(
            ("checkpoint.keep_best", "checkpoint.every", "eval.every", "steps"),
            f"no step up to steps = {config.steps} is both saved (checkpoint.every = {settings.every}) and evaluated "
            f"(eval.every = {evaluation.every}); make one a multiple of the other",
        )


CHECKPOINT_RULES: tuple[Rule, ...] = (
    kept_checkpoints_are_saved_ones,
    exported_steps_are_saved_ones,
    accepted_changes_are_known,
    the_best_checkpoint_is_one_of_several,
    the_best_by_an_evaluation_is_evaluated,
)
