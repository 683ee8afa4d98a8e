"""A run as far as memory is concerned: who sits where, in which dtypes, and how much is computed at a time."""

from dataclasses import dataclass

from tidemill.config.cluster import InlineClusterSettings, RayClusterSettings
from tidemill.config.engine import TransformersEngineSettings, VllmEngineSettings, replicas_for
from tidemill.config.kinds import compute_dtype
from tidemill.config.run import RunConfig
from tidemill.config.trainer import FsdpTrainerSettings
from tidemill.errors import ConfigError
from tidemill.planning.generation import Generation
from tidemill.planning.passes import Work

__all__ = ["Setup", "setup_of"]

_ITEMSIZES = {"float32": 4, "bfloat16": 2}


@dataclass(frozen=True, kw_only=True)
class Setup:
    """`device` is `cpu` or `cuda`; no `replicas` when rollouts are replayed. `together`: all in one process.

    `shared`: trainer and engine sit on the same devices. `phases` are the works of one micro-batch, by phase.
    """

    device: str
    ranks: int
    replicas: int
    together: bool
    shared: bool
    phases: tuple[Work, ...]
    generation: Generation

    @property
    def workers(self) -> int:
        """Processes that compute."""
        return 1 if self.together else self.ranks + self.replicas

    @property
    def processes(self) -> int:
        """All of them, the driver included."""
        return 1 if self.together else self.workers + 1

    @property
    def contexts(self) -> int:
        """Processes on a device that trainer and engine share."""
        return 1 if self.together or not self.replicas else 2


def setup_of(config: RunConfig, *, device: str) -> Setup:
    """Raises ConfigError for a trainer, engine or cluster that is not Tidemill's own: nobody knows what it takes."""
    for name, kind, known in (
        ("trainer", config.trainer, FsdpTrainerSettings),
        ("engine", config.engine, (TransformersEngineSettings, VllmEngineSettings)),
        ("cluster", config.cluster, (InlineClusterSettings, RayClusterSettings)),
    ):
        if not isinstance(kind, known):
            raise ConfigError(
                f"cannot plan for {name}.use = {kind.use!r}: only Tidemill's own are known; start the run with few "
                "tokens and look at the memory in its report"
            )
    ray = config.cluster if isinstance(config.cluster, RayClusterSettings) else None
    shared = ray is None or ray.placement == "colocated"
    engines = replicas_for(config.engine.replicas, ranks=config.trainer.ranks, shares_gpus=shared and device == "cuda")
    return Setup(
        device=device,
        ranks=config.trainer.ranks,
        replicas=0 if config.rollout.replay is not None else 1 if ray is None else engines,
        together=ray is None,
        shared=shared,
        phases=_phases(config, _ITEMSIZES[compute_dtype(config.trainer.dtype, device)]),
        generation=_generation(config, _ITEMSIZES[compute_dtype(config.engine.dtype, device)]),
    )


def _generation(config: RunConfig, itemsize: int) -> Generation:
    engine = config.engine
    paged = isinstance(engine, VllmEngineSettings)
    asked = engine.kv_memory if isinstance(engine, VllmEngineSettings) else "auto"
    return Generation(
        rows=engine.max_batch,
        prompt=config.data.max_prompt_tokens,
        new=config.rollout.sampling.max_new_tokens,
        itemsize=itemsize,
        paged=paged,
        cache_bytes=0 if asked == "auto" else asked,
    )


def _phases(config: RunConfig, itemsize: int) -> tuple[Work, ...]:
    """Demonstrations are taken to be as long as prompts and answers may be: nobody has read them yet."""
    works = []
    if config.steps > config.warm_up.steps:
        works.append(_work(config, itemsize, rows=config.rollout.prompts * config.rollout.samples))
    if config.warm_up.steps:
        works.append(_work(config, itemsize, rows=config.warm_up.batch))
    return tuple(works)


def _work(config: RunConfig, itemsize: int, *, rows: int) -> Work:
    """Every row as long as it may be; the last token of each is predicted and not fed in."""
    trainer, new = config.trainer, config.rollout.sampling.max_new_tokens
    mine = -(-rows // (trainer.minibatches * trainer.ranks))
    longest = config.data.max_prompt_tokens + new - 1
    tokens = min(max(trainer.tokens_per_micro_batch, longest), mine * longest)
    return Work(
        tokens=tokens,
        trained=min(tokens, mine * new),
        passes=-(-mine * longest // tokens),
        itemsize=itemsize,
        recompute=trainer.recompute,
        ranks=trainer.ranks,
        shards=trainer.ranks // trainer.replicas,
    )
