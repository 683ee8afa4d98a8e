"""The only place that knows all names: from a config to the parts that a loop is given."""

import contextlib
import functools
import gc
import random
from collections.abc import Callable, Iterator

import numpy as np
import torch

from tidemill.app import build
from tidemill.app.accepted_changes import AcceptedChanges, Rebase, as_it_is
from tidemill.app.export import exports_of
from tidemill.app.identity import run_identity
from tidemill.app.run_folder import RunFolder
from tidemill.checkpoint.manager import CheckpointManager
from tidemill.checkpoint.schedule import EpochEnds, no_epochs
from tidemill.config.load import Loaded
from tidemill.config.run import RunConfig
from tidemill.contracts.cluster import Cluster
from tidemill.contracts.engine import RolloutEngine
from tidemill.contracts.environment import Environment, Reward
from tidemill.contracts.events import Emit, Notice
from tidemill.contracts.footprint import Part
from tidemill.contracts.parts import Agreement, Evaluation, Parts, Rollout, StopSignal, WarmUp
from tidemill.contracts.recorder import Recorder
from tidemill.contracts.residency import Residency
from tidemill.contracts.state import Cursor, RunState
from tidemill.contracts.trainer import Trainer
from tidemill.contracts.weights import WeightSync
from tidemill.data.demonstrations import Demonstrations
from tidemill.data.prompt_source import PromptsPerStep
from tidemill.data.tokenizer import Tokenizer
from tidemill.engines.replay.engine import NoWeightSync, ReplayEngine
from tidemill.planning.budget import NO_LIMIT, budget_for, check_budget, offload_mode
from tidemill.planning.groups import parks_groups
from tidemill.recorders.recorded import RecordedNumber
from tidemill.residency.manager import LeaseManager
from tidemill.rollout.agreement import EngineAgreement, NoAgreement
from tidemill.rollout.collect import RolloutCollector
from tidemill.rollout.evaluate import Evaluator, NoEvaluation
from tidemill.rollout.replay import ReplayRollout
from tidemill.rollout.warm_up import NoWarmUp, SupervisedWarmUp
from tidemill.units import format_bytes

__all__ = ["assembled", "prepare_torch"]


def prepare_torch(config: RunConfig) -> None:
    """Threads of this process, and the seed of every generator in it; a restore puts a later state in its place."""
    if config.run.threads:
        torch.set_num_threads(config.run.threads)
    random.seed(config.run.seed)
    np.random.seed(config.run.seed % 2**32)
    torch.manual_seed(config.run.seed)


@contextlib.contextmanager
def assembled(
    loaded: Loaded, cluster: Cluster, *, folder: RunFolder, attempt: int, recorder: Recorder, stop: StopSignal
) -> Iterator[Parts]:
    """Every part, built, its workers placed by `cluster`; child processes end with the block.

    Raises Interrupted between two parts that take long: nothing is there yet that a signal could lose.
    """
    config, emit = loaded.config, recorder.emit
    stop.check()
    prepare_torch(config)
    with contextlib.ExitStack() as stack:
        tokenizer = Tokenizer(config.model, allow_special_tokens=config.data.allow_special_tokens)
        reward = build.build_reward(config, emit)
        stack.callback(reward.close)
        environment = build.build_environment(config)
        data = build.build_data(config, config.data.prompts, tokenizer, emit)
        evaluation = _evaluation(config, tokenizer, environment, reward, emit)
        warm_up, rebase_demonstrations, demonstrations = _warm_up(config, tokenizer, emit)
        ends = EpochEnds(prompts=len(data), demonstrations=demonstrations)
        changes = AcceptedChanges(
            accept=config.checkpoint.accept,
            prompts=data.rebase,
            demonstrations=rebase_demonstrations,
            warm_up_steps=config.warm_up.steps,
            emit=emit,
        )
        algorithm = build.build_algorithm(config)
        # The engine first: while it starts it may need a GPU for itself, and it is asleep then.
        engine, make_sync = _engine(config, cluster, emit)
        stop.check()
        trainer = cluster.trainer(functools.partial(build.build_trainer, config), ranks=config.trainer.ranks)
        stack.callback(trainer.close)
        residency = leases(config, cluster, trainer=trainer, engine=engine, emit=emit)
        stack.callback(residency.close)
        stop.check()
        checkpointer = _checkpointer(loaded, folder, trainer, recorder, residency, attempt, changes, ends)
        stack.enter_context(_kept_from_collection())
        yield Parts(
            trainer=trainer,
            engine=engine,
            residency=residency,
            weights=make_sync(residency),
            checkpointer=checkpointer,
            data=PromptsPerStep(data, config.rollout.prompts),
            rollout=_rollout(config, environment, reward, emit),
            algorithm=algorithm,
            agreement=_agreement(config, cluster, tokenizer, emit),
            warm_up=warm_up,
            evaluation=evaluation,
            recorder=recorder,
            stop=stop,
            fresh_state=lambda: RunState(
                step=0, attempt=attempt, seed=config.run.seed, cursor=Cursor(), warm_up_cursor=Cursor()
            ),
        )


@contextlib.contextmanager
def _kept_from_collection() -> Iterator[None]:
    """What is there now stays until the end: else Python looks through all of it whenever many objects are made."""
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


MakeSync = Callable[[Residency], WeightSync]


def _engine(config: RunConfig, cluster: Cluster, emit: Emit) -> tuple[RolloutEngine, MakeSync]:
    """The engine, and what hands weights to it, which waits for the leases of both."""
    if config.rollout.replay is not None:
        emit(Notice(text=f"replaying rollouts of {config.rollout.replay}: no engine is built, nothing is evaluated"))
        return ReplayEngine(), lambda residency: NoWeightSync()
    engine = build.place_engine(config, cluster, emit, ranks=config.trainer.ranks)
    return engine, lambda residency: build.build_weight_sync(config, cluster, residency, emit)


def _rollout(config: RunConfig, environment: Environment, reward: Reward, emit: Emit) -> Rollout:
    if config.rollout.replay is not None:
        return ReplayRollout(
            config.rollout.replay,
            sampling=build.train_sampling(config),
            samples=config.rollout.samples,
            emit=emit,
        )
    return RolloutCollector(
        environment=environment,
        reward=reward,
        sampling=build.train_sampling(config),
        samples=config.rollout.samples,
        emit=emit,
    )


def _agreement(config: RunConfig, cluster: Cluster, tokenizer: Tokenizer, emit: Emit) -> Agreement:
    if config.rollout.replay is not None:
        return NoAgreement()
    return EngineAgreement(limit=build.mismatch_limit(config, cluster.device), decode=tokenizer.decode, emit=emit)


def _evaluation(
    config: RunConfig, tokenizer: Tokenizer, environment: Environment, reward: Reward, emit: Emit
) -> Evaluation:
    if config.eval.data is None or config.rollout.replay is not None:
        return NoEvaluation()
    prompts = build.build_data(config, config.eval.data, tokenizer, emit).all_prompts(config.eval.limit)
    return Evaluator(
        prompts=prompts,
        environment=environment,
        reward=reward,
        sampling=build.eval_sampling(config),
        samples=config.eval.samples,
        every=config.eval.every,
        before_training=config.eval.before_training,
        first_step=config.warm_up.steps,
        emit=emit,
    )


def _warm_up(config: RunConfig, tokenizer: Tokenizer, emit: Emit) -> tuple[WarmUp, Rebase, int]:
    """The supervised phase, how its data takes on a cursor of other data, and the rows that it has an epoch."""
    if config.warm_up.steps == 0 or config.warm_up.data is None:
        return NoWarmUp(), as_it_is, 0
    data = build.build_data(config, config.warm_up.data, tokenizer, emit)
    demonstrations = Demonstrations(data, tokenizer, config.warm_up.batch)
    return SupervisedWarmUp(steps=config.warm_up.steps, demonstrations=demonstrations), data.rebase, len(data)


def leases(config: RunConfig, cluster: Cluster, *, trainer: Trainer, engine: RolloutEngine, emit: Emit) -> LeaseManager:
    """The residency of each device that trainer and engine share, under the budget that the settings stand for.

    One decision serves all devices: it is taken for the fullest. Says what it chose.
    """
    if not cluster.shares_devices:
        apart = "have GPUs of their own" if cluster.device == "cuda" else "take no turns on a CPU"
        emit(Notice(text=f"trainer and engine {apart}: both stay awake"))
        manager = LeaseManager(budget=NO_LIMIT, emit=emit, deadline=config.residency.deadline)
        manager.admit(trainer)
        return manager
    mode = offload_mode(
        trainer=config.trainer.offload, engine=config.engine.offload, residency=config.residency.offload
    )
    sizes = {
        "trainer_bytes": trainer.footprint(Part.ALL),
        "engine_weight_bytes": engine.footprint(Part.WEIGHTS),
        "engine_bytes": engine.footprint(Part.ALL),
    }
    # What the trainer holds counts as free, for it can sleep. Its gradients are resident and not allocated yet.
    held = trainer.footprint(trainer.resident() & (Part.WEIGHTS | Part.OPTIMIZER))
    budget, sentence = budget_for(mode, **sizes, device_bytes=cluster.free_bytes() + held)
    if mode == "auto" and config.residency.budget != "auto":
        budget = config.residency.budget
        sentence = f"residency.budget is {format_bytes(budget)}: who is idle sleeps when another needs the bytes"
    emit(Notice(text=sentence))
    check_budget(budget, **sizes)
    _settle_groups(config, cluster, offload=mode, budget=budget, engine_bytes=sizes["engine_bytes"], emit=emit)
    manager = LeaseManager(budget=budget, emit=emit, deadline=config.residency.deadline)
    manager.admit(trainer)
    return manager


def _settle_groups(
    config: RunConfig, cluster: Cluster, *, offload: str, budget: int, engine_bytes: int, emit: Emit
) -> None:
    parks, sentence = parks_groups(
        config.residency.park_groups,
        offload=offload,
        device=cluster.device,
        ranks=config.trainer.ranks,
        budget=budget,
        engine_bytes=engine_bytes,
    )
    cluster.park_groups(parks)
    if sentence:
        emit(Notice(text=sentence))


def _checkpointer(
    loaded: Loaded,
    folder: RunFolder,
    trainer: Trainer,
    recorder: Recorder,
    residency: LeaseManager,
    attempt: int,
    changes: AcceptedChanges,
    ends: EpochEnds,
) -> CheckpointManager:
    config = loaded.config
    settings = config.checkpoint
    number = RecordedNumber(folder.root / "metrics.jsonl", settings.keep_best.removeprefix("-"))
    return CheckpointManager(
        folder=folder.checkpoints,
        stateful=[trainer, recorder],
        trainer=trainer,
        residency=residency,
        every=settings.every,
        last_step=config.steps,
        mode=settings.mode,
        keep_last=settings.keep_last,
        keep_every=settings.keep_every,
        keep_best=settings.keep_best,
        measured=number,
        epochs=ends if settings.at_epoch_end else no_epochs,
        on_failure=settings.on_failure,
        walk_back=settings.walk_back,
        accept=settings.accept,
        identity=run_identity(config),
        settings=loaded.to_json(),
        attempt=attempt,
        seed=config.run.seed,
        grace=settings.grace,
        emit=recorder.emit,
        exports=exports_of(config, folder, recorder.emit),
        trial=settings.trial,
        fit=changes,
    )
