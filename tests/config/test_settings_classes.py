"""The section classes: tidemill.config.base, kinds, fields, and one module a section.

Sections: tidemill.config.trainer, tidemill.config.optimizer, tidemill.config.warm_up, tidemill.config.engine,
tidemill.config.residency, tidemill.config.checkpoint, tidemill.config.eval, tidemill.config.rollout,
tidemill.config.algorithm, tidemill.config.data, tidemill.config.reward, tidemill.config.environment,
tidemill.config.cluster, tidemill.config.recorder, tidemill.config.weights.
"""

from collections.abc import Callable

import pytest
from pydantic import ValidationError

from tidemill.config.base import Plug, Settings
from tidemill.config.engine import TransformersEngineSettings, VllmEngineSettings
from tidemill.config.fields import field_at, is_text, leaves, section_class, sections
from tidemill.config.kinds import Size
from tidemill.config.load import Loaded
from tidemill.config.optimizer import OptimizerSettings, WarmUpOptimizerSettings
from tidemill.config.reward import RegexSettings
from tidemill.config.run import RunConfig
from tidemill.config.trainer import FsdpTrainerSettings, TrainerSettings

NAMES = """
model steps run.dir run.seed run.device run.threads
trainer.use trainer.ranks trainer.replicas trainer.dtype trainer.tokens_per_micro_batch trainer.minibatches
trainer.recompute trainer.max_grad_norm trainer.offload trainer.keep_addresses
trainer.optimizer.lr trainer.optimizer.betas trainer.optimizer.eps
trainer.optimizer.weight_decay trainer.schedule.kind trainer.schedule.warm_up_steps trainer.schedule.min_ratio
warm_up.steps warm_up.data warm_up.batch warm_up.optimizer.lr warm_up.optimizer.betas warm_up.optimizer.eps
warm_up.optimizer.weight_decay warm_up.schedule.kind warm_up.schedule.warm_up_steps warm_up.schedule.min_ratio
engine.use engine.replicas engine.dtype engine.max_batch engine.offload
residency.offload residency.budget residency.page residency.spare residency.park_groups residency.leaks
residency.deadline weights.verify weights.verify_within
checkpoint.every checkpoint.at_epoch_end checkpoint.mode checkpoint.keep_last checkpoint.keep_every checkpoint.keep_best
checkpoint.on_failure checkpoint.grace checkpoint.trial
checkpoint.walk_back checkpoint.accept checkpoint.export checkpoint.export_every checkpoint.export_dtype
eval.every eval.before_training eval.data eval.temperature eval.samples eval.limit
rollout.prompts rollout.samples rollout.dump rollout.replay rollout.max_mismatch
rollout.sampling.temperature rollout.sampling.top_p rollout.sampling.top_k rollout.sampling.max_new_tokens
rollout.sampling.stop rollout.sampling.stop_token_ids
algorithm.use algorithm.clip_low algorithm.clip_high algorithm.normalize_std
data.use data.prompts data.shuffle data.max_prompt_tokens data.skip_bad_lines data.chat data.allow_special_tokens
reward.use reward.strip
environment.use cluster.use recorder.use
recorder.wandb.project recorder.wandb.entity recorder.wandb.name recorder.wandb.mode
"""


def test_the_names_that_users_rely_on_stay() -> None:
    assert {".".join(leaf.path) for leaf in leaves(RunConfig, {})} == set(NAMES.split())


def test_the_limits_of_a_reward_go_with_the_rewards_that_have_them() -> None:
    limits = {"timeout", "memory", "workers", "failure_budget"}
    for use, has in {"regex": True, "my.module:score": True, "exact_match": False}.items():
        names = {leaf.path[-1] for leaf in leaves(RunConfig, {"reward": {"use": use}})}
        assert limits <= names if has else not limits & names


def test_vllm_has_settings_of_its_own_and_refuses_what_is_none() -> None:
    own = {"kv_memory", "graphs", "deadline", "options"}
    assert own <= {leaf.path[-1] for leaf in leaves(VllmEngineSettings, {})}
    assert not own & {leaf.path[-1] for leaf in leaves(TransformersEngineSettings, {})}
    fine = {"use": "vllm", "kv_memory": "2 GiB", "options": ["block_size=32"]}
    assert VllmEngineSettings.model_validate(fine).kv_memory == 2 << 30
    for wrong in ({"kv_memory": 0}, {"kv_memory": "much"}, {"graphs": 1}, {"deadline": 0.0}, {"options": [""]}):
        with pytest.raises(ValidationError):
            VllmEngineSettings.model_validate({"use": "vllm", **wrong})


def test_settings_are_strict_closed_and_frozen() -> None:
    class One(Settings):
        number: int = 1
        size: Size = 1

    for wrong in ({"number": "1"}, {"number": True}, {"number": 1.0}, {"nmber": 1}, {"size": 1.5}, {"size": "1.5 x"}):
        with pytest.raises(ValidationError):
            One.model_validate(wrong)
    with pytest.raises(ValidationError):
        One().number = 2  # type: ignore[misc]
    assert One.model_validate({"size": "1.5 KiB"}).size == 1536


def test_a_part_of_a_section_leaves_the_rest_at_the_section_s_own_defaults() -> None:
    assert WarmUpOptimizerSettings(eps=1e-6).lr == WarmUpOptimizerSettings().lr != OptimizerSettings().lr


def test_sections_are_found_with_the_class_that_use_names() -> None:
    tree = {"reward": {"use": "regex"}}
    field = field_at(RunConfig, tree, ("reward",))
    assert field is not None and section_class(field, tree["reward"]) is RegexSettings
    assert ("reward", "pattern") in [leaf.path for leaf in leaves(RunConfig, tree)]
    assert ("reward", "pattern") not in [leaf.path for leaf in leaves(RunConfig, {})]
    assert ("trainer", "optimizer") in list(sections(RunConfig, {}))
    assert field_at(RunConfig, {}, ("steps", "more")) is None
    assert field_at(RunConfig, {}, ("nothing",)) is None


def test_text_is_told_from_numbers() -> None:
    text = {leaf.path[-1] for leaf in leaves(RunConfig, {}) if is_text(leaf.field)}
    assert {"model", "dir", "use", "mode", "prompts", "project"} <= text
    assert not {"budget", "page", "steps", "lr", "recompute", "betas", "stop"} & text


def test_a_plug_names_its_implementation_without_importing_it() -> None:
    assert issubclass(FsdpTrainerSettings, TrainerSettings) and issubclass(TrainerSettings, Plug)
    assert FsdpTrainerSettings.implementation == "tidemill.trainers.fsdp.trainer:FsdpTrainer"


@pytest.mark.parametrize(("written", "bytes_"), [("0", 0), ('"auto"', "auto"), ('"2 GiB"', 2 << 30)])
def test_spare_memory_may_be_none(loaded: Callable[..., Loaded], written: str, bytes_: object) -> None:
    assert loaded(f"residency.spare={written}").config.residency.spare == bytes_
