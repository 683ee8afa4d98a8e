"""From settings to parts, one function a seam.

A plug-in's implementation is called with the seam's keyword arguments, which its built-in implementation shows, and
with every field that its settings class adds to the seam's own.
"""

import functools
import math
from pathlib import Path
from typing import Any, cast

from tidemill.cluster.inline import InlineCluster
from tidemill.config.algorithm import AlgorithmSettings
from tidemill.config.base import Plug
from tidemill.config.cluster import ClusterSettings
from tidemill.config.data import DataSettings
from tidemill.config.engine import EngineSettings, replicas_for
from tidemill.config.environment import EnvironmentSettings
from tidemill.config.kinds import compute_dtype
from tidemill.config.optimizer import OptimizerSettings, ScheduleSettings
from tidemill.config.registry import implementation
from tidemill.config.reward import FunctionRewardSettings, GuardedRewardSettings, RewardSettings
from tidemill.config.run import RunConfig
from tidemill.config.trainer import TrainerSettings
from tidemill.contracts.algorithm import Algorithm
from tidemill.contracts.cluster import Cluster
from tidemill.contracts.engine import RolloutEngine, Sampling
from tidemill.contracts.environment import Environment, Reward
from tidemill.contracts.events import Emit
from tidemill.contracts.residency import Residency
from tidemill.contracts.trainer import RankTrainer
from tidemill.contracts.weights import Samples, WeightSync
from tidemill.contracts.workers import Place
from tidemill.data.jsonl import JsonlData
from tidemill.data.tokenizer import Tokenizer
from tidemill.trainers.common.schedule import PhaseSettings
from tidemill.weights.direct import DirectWeightSync
from tidemill.weights.samples import WeightsInTurn, every_weight, no_weight

__all__ = [
    "build_algorithm",
    "build_cluster",
    "build_data",
    "build_engine",
    "build_engine_cluster",
    "build_environment",
    "build_reward",
    "build_trainer",
    "build_weight_sync",
    "engine_replicas",
    "eval_sampling",
    "mismatch_limit",
    "place_engine",
    "train_sampling",
    "weight_samples",
]

# Of residency.deadline, how long a rank waits for the others. Less than the driver, which ends them all by then: one of
# those who wait must be able to tell before which rank did not come.
_RANKS_WAIT = 0.8

# Mean difference of log-probs, in nats, that bfloat16 explains on either side, with room to spare: up to 0.042 was
# measured, of a model that was not sure of its answers yet.
_BFLOAT16_MISMATCH = 0.1


def _own(settings: Plug, seam: type[Plug]) -> dict[str, Any]:
    """What a settings class adds to those of its seam, by name."""
    return {name: getattr(settings, name) for name in type(settings).model_fields if name not in seam.model_fields}


def _made(settings: Plug, seam: type[Plug], **values: Any) -> Any:
    return implementation(settings)(**values, **_own(settings, seam))


def build_cluster(config: RunConfig, emit: Emit) -> Cluster:
    """Where workers live. A replay needs no engine, nor do servers elsewhere: room is made for none."""
    needless = config.rollout.replay is not None or type(config.engine).elsewhere
    replicas = 0 if needless else config.engine.replicas
    logs = config.run.dir / "logs"
    return _cluster(config, emit, ranks=config.trainer.ranks, replicas=replicas, log_folder=logs)


def build_engine_cluster(config: RunConfig, emit: Emit, *, log_folder: Path) -> Cluster:
    """Where engines live when no trainer is built: room is made for none. Servers elsewhere need no cluster."""
    if type(config.engine).elsewhere:
        return InlineCluster(device=config.run.device, emit=emit)
    return _cluster(config, emit, ranks=0, replicas=config.engine.replicas, log_folder=log_folder)


def _cluster(config: RunConfig, emit: Emit, *, ranks: int, replicas: int | str, log_folder: Path) -> Cluster:
    return cast(
        Cluster,
        _made(
            config.cluster,
            ClusterSettings,
            device=config.run.device,
            ranks=ranks,
            replicas=replicas,
            max_batch=config.engine.max_batch,
            seed=config.run.seed,
            threads=config.run.threads,
            transition_deadline=config.residency.deadline,
            log_folder=log_folder,
            emit=emit,
        ),
    )


def engine_replicas(config: RunConfig, cluster: Cluster, *, ranks: int) -> int:
    """What `engine.replicas` stands for on this cluster, beside a trainer of `ranks`; 0 where there is none."""
    shares_gpus = cluster.shares_devices and cluster.device == "cuda"
    return replicas_for(config.engine.replicas, ranks=ranks, shares_gpus=shares_gpus)


def build_trainer(config: RunConfig, place: Place, emit: Emit) -> RankTrainer:
    """One rank's trainer, awake, with its gate closed."""
    settings = config.trainer
    warm_up = _phase(config.warm_up.optimizer, config.warm_up.schedule, config.warm_up.steps)
    rl = _phase(settings.optimizer, settings.schedule, config.steps - config.warm_up.steps)
    return cast(
        RankTrainer,
        _made(
            settings,
            TrainerSettings,
            model=config.model,
            place=place,
            replicas=settings.replicas,
            compute_dtype=compute_dtype(settings.dtype, place.device),
            tokens_per_micro_batch=settings.tokens_per_micro_batch,
            minibatches=settings.minibatches,
            recompute=settings.recompute,
            max_grad_norm=settings.max_grad_norm,
            phases={"warm_up": warm_up, "rl": rl},
            page_bytes=config.residency.page,
            spare_bytes=None if config.residency.spare == "auto" else config.residency.spare,
            keep_addresses=settings.keep_addresses,
            stop_on_leak=config.residency.leaks == "fail",
            deadline=_RANKS_WAIT * config.residency.deadline,
            emit=emit,
        ),
    )


def _phase(optimizer: OptimizerSettings, schedule: ScheduleSettings, steps: int) -> PhaseSettings:
    return PhaseSettings(
        lr=optimizer.lr,
        betas=optimizer.betas,
        eps=optimizer.eps,
        weight_decay=optimizer.weight_decay,
        schedule=schedule.kind,
        warm_up_steps=schedule.warm_up_steps,
        min_ratio=schedule.min_ratio,
        total_steps=steps,
    )


def build_engine(config: RunConfig, place: Place, emit: Emit) -> RolloutEngine:
    """One replica of the engine, asleep; its cache is sized for the longest prompts and answers of the settings."""
    longest = config.data.max_prompt_tokens + config.rollout.sampling.max_new_tokens
    return cast(
        RolloutEngine,
        _made(
            config.engine,
            EngineSettings,
            model=config.model,
            device=place.device,
            dtype=compute_dtype(config.engine.dtype, place.device),
            max_batch=config.engine.max_batch,
            kv_tokens=config.engine.max_batch * longest,
            stop_on_leak=config.residency.leaks == "fail",
            emit=emit,
        ),
    )


def place_engine(config: RunConfig, cluster: Cluster, emit: Emit, *, ranks: int) -> RolloutEngine:
    """The engine, on `cluster` beside a trainer of `ranks`; one that is elsewhere is spoken to from here."""
    if type(config.engine).elsewhere:
        return build_engine(config, Place(device=cluster.device), emit)
    replicas = engine_replicas(config, cluster, ranks=ranks)
    return cluster.engine(functools.partial(build_engine, config), replicas=replicas)


def build_weight_sync(config: RunConfig, cluster: Cluster, residency: Residency, emit: Emit) -> WeightSync:
    """What hands weights over: within the cluster, or from it to an engine that is elsewhere."""
    samples = weight_samples(config)
    if type(config.engine).elsewhere:
        return DirectWeightSync(residency=residency, emit=emit, samples=samples, words=cluster.device == "cuda")
    return cluster.weight_sync(residency, emit, samples=samples)


def build_algorithm(config: RunConfig) -> Algorithm:
    """Advantages, packing and loss."""
    temperature = config.rollout.sampling.temperature
    return cast(Algorithm, _made(config.algorithm, AlgorithmSettings, temperature=temperature))


def mismatch_limit(config: RunConfig, device: str) -> float:
    """What `rollout.max_mismatch` stands for, in nats; infinity for no limit."""
    wanted = config.rollout.max_mismatch
    if isinstance(wanted, float):
        return wanted
    if wanted == "off":
        return math.inf
    dtypes = {compute_dtype(settings.dtype, device) for settings in (config.engine, config.trainer)}
    return type(config.engine).float32_mismatch if dtypes == {"float32"} else _BFLOAT16_MISMATCH


def weight_samples(config: RunConfig) -> Samples:
    """What `weights.verify` stands for."""
    match config.weights.verify:
        case "always":
            return every_weight
        case "sampled":
            return WeightsInTurn(within=config.weights.verify_within)
        case "off":
            return no_weight


def build_data(config: RunConfig, path: Any, tokenizer: Tokenizer, emit: Emit) -> JsonlData:
    """Prompts of a file, read as `data.*` says."""
    settings = config.data
    return cast(
        JsonlData,
        _made(
            settings,
            DataSettings,
            path=path,
            tokenizer=tokenizer,
            seed=config.run.seed,
            shuffle=settings.shuffle,
            max_prompt_tokens=settings.max_prompt_tokens,
            skip_bad_lines=settings.skip_bad_lines,
            chat=settings.chat,
            emit=emit,
        ),
    )


def build_environment(config: RunConfig) -> Environment:
    """Who plays episodes."""
    return cast(Environment, _made(config.environment, EnvironmentSettings))


def build_reward(config: RunConfig, emit: Emit) -> Reward:
    """Who scores them. One that runs in child processes tells of their ends, and a function is known by its `use`."""
    settings = config.reward
    values = _own(settings, RewardSettings)
    if isinstance(settings, GuardedRewardSettings):
        values["emit"] = emit
    if isinstance(settings, FunctionRewardSettings):
        values["use"] = settings.use
    return cast(Reward, implementation(settings)(**values))


def train_sampling(config: RunConfig) -> Sampling:
    """How answers to learn from are sampled."""
    settings = config.rollout.sampling
    return Sampling(
        max_new_tokens=settings.max_new_tokens,
        temperature=settings.temperature,
        top_p=settings.top_p,
        top_k=settings.top_k,
        stop=settings.stop,
        stop_token_ids=settings.stop_token_ids,
        seed=config.run.seed,
    )


def eval_sampling(config: RunConfig) -> Sampling:
    """How answers to judge by are sampled: every token is kept, at the evaluation's own temperature."""
    settings = config.rollout.sampling
    return Sampling(
        max_new_tokens=settings.max_new_tokens,
        temperature=config.eval.temperature,
        stop=settings.stop,
        stop_token_ids=settings.stop_token_ids,
        seed=config.run.seed,
    )
