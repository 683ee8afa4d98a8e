"""What of a plan cannot be, and which settings would change it."""

from collections.abc import Callable, Iterator

from tidemill.config.cluster import InlineClusterSettings
from tidemill.config.run import RunConfig
from tidemill.planning.moments import Moment
from tidemill.planning.plan import Plan
from tidemill.units import MIB, format_bytes

__all__ = ["problems"]

Lower = Callable[[str, RunConfig], Iterator[str]]

_SHOWN = 3


def problems(plan: Plan, config: RunConfig) -> list[str]:
    """A sentence for each thing that does not fit; none when all is well, or nobody knows how much there is."""
    hopeless = list(_of_small_devices(plan, config))
    of_devices = hopeless or [*_of_budget(plan), *_of_devices(plan, config)]
    return [*_of_context(plan), *of_devices, *_of_host(plan, config), *_of_disk(plan, config)]


def _of_disk(plan: Plan, config: RunConfig) -> Iterator[str]:
    disk = plan.disk
    if disk.free is not None and disk.free < disk.checkpoint:
        yield (
            f"cannot save a checkpoint: it takes {format_bytes(disk.checkpoint)}, and {format_bytes(disk.free)} are "
            f"free for {config.run.dir}; free some, or set run.dir to a folder on a larger disk"
        )


def _of_context(plan: Plan) -> Iterator[str]:
    """The engine refuses such a prompt when it comes, which may be hours into a run."""
    generation, context = plan.setup.generation, plan.model.decoder.context
    asked = generation.prompt + generation.new
    if plan.setup.replicas and asked > context:
        yield (
            f"cannot answer its longest prompts: data.max_prompt_tokens ({generation.prompt}) and "
            f"rollout.sampling.max_new_tokens ({generation.new}) come to {asked} positions, and the model "
            f"has {context} (max_position_embeddings in its config.json); lower one of the two settings"
        )


def _of_small_devices(plan: Plan, config: RunConfig) -> Iterator[str]:
    """GPUs that are full of what neither more ranks nor any other setting makes smaller."""
    there = plan.machine.device_bytes
    for seat in plan.seats:
        fixed = max((_fixed(moment, config) for moment in seat.moments), key=lambda moment: moment.bytes)
        if there is not None and fixed.bytes > there:
            yield (
                f"cannot fit into the {format_bytes(there)} of a GPU ({seat.name}): of {fixed.name}, what no setting "
                f"lowers {_most(fixed).removeprefix(fixed.name).strip()}; choose a smaller model, or a larger GPU"
            )


def _fixed(moment: Moment, config: RunConfig) -> Moment:
    kept = {"context", "trainer/groups", "trainer/staging"}
    if config.engine.dtype != "float32" and moment.name in ("rollout", "hand-over"):
        kept.add("engine/weights")
    return Moment(name=moment.name, parts={name: count for name, count in moment.parts.items() if name in kept})


def _of_budget(plan: Plan) -> Iterator[str]:
    if plan.choice.refusal:
        yield plan.choice.refusal


def _of_devices(plan: Plan, config: RunConfig) -> Iterator[str]:
    there = plan.machine.device_bytes
    for seat in plan.seats:
        if there is not None and seat.largest.bytes > there:
            yield (
                f"cannot fit into the {format_bytes(there)} of a GPU ({seat.name}): {_most(seat.largest)}; "
                f"{_advice(seat.largest, plan, config, _lower)}"
            )


def _of_host(plan: Plan, config: RunConfig) -> Iterator[str]:
    there, largest = plan.machine.host_bytes, plan.largest_on_host
    if there is not None and largest.bytes > there:
        advice = [_advice(largest, plan, config, _lower_on_host), *_less_spare(plan, config, largest.bytes - there)]
        yield (
            f"cannot fit into the {format_bytes(there)} of host memory that can be had: {_most(largest)}; "
            f"{'; '.join(reversed(advice))}"
        )


def _less_spare(plan: Plan, config: RunConfig, excess: int) -> Iterator[str]:
    """What to set where `excess` bytes are too many. Fewer spare pages cost no more than waits for saves."""
    now = plan.tenants.arena.spares
    left = now - -(-excess // plan.setup.ranks)
    if now:
        auto = "auto, " if config.residency.spare == "auto" else ""
        enough = "" if left >= 0 else "; that alone is not enough"
        yield (
            f"lower residency.spare ({auto}{format_bytes(now)} a rank) to {max(left, 0) // MIB}MiB, "
            f"at which sleeps wait longer for saves{enough}"
        )


def _largest(moment: Moment) -> list[tuple[str, int]]:
    return sorted(moment.parts.items(), key=lambda part: -part[1])[:_SHOWN]


def _most(moment: Moment) -> str:
    parts = ", ".join(f"{name} {format_bytes(count)}" for name, count in _largest(moment))
    return f"{moment.name} takes {format_bytes(moment.bytes)} ({parts})"


def _advice(moment: Moment, plan: Plan, config: RunConfig, lower: Lower) -> str:
    """What lowers the largest parts, in the order of their size, each setting once."""
    found: dict[str, None] = {}
    if not plan.choice.turns and plan.setup.shared and plan.setup.replicas:
        found["set residency.offload=always, so that trainer and engine take turns"] = None
    for name, _ in _largest(moment):
        found |= dict.fromkeys(lower(name, config))
    return "; ".join(found) or "choose a smaller model"


def _lower(part: str, config: RunConfig) -> Iterator[str]:
    """Settings that make a part smaller, with the values that they have."""
    trainer, engine, sampling = config.trainer, config.engine, config.rollout.sampling
    match part:
        case "trainer/activations" | "trainer/logits":
            yield f"lower trainer.tokens_per_micro_batch ({trainer.tokens_per_micro_batch})"
            if part == "trainer/activations" and not trainer.recompute:
                yield "set trainer.recompute=true"
        case "trainer/weights" | "trainer/moments" | "trainer/gradients" | "trainer/loading":
            if trainer.replicas > 1:
                yield f"lower trainer.replicas ({trainer.replicas})"
            with_ray = " with cluster.use=ray" if isinstance(config.cluster, InlineClusterSettings) else ""
            yield f"raise trainer.ranks ({trainer.ranks}){with_ray}, over which these are cut"
        case "engine/cache" | "engine/working":
            yield (
                f"lower engine.max_batch ({engine.max_batch}), data.max_prompt_tokens "
                f"({config.data.max_prompt_tokens}) or rollout.sampling.max_new_tokens ({sampling.max_new_tokens})"
            )
        case "engine/weights":
            if engine.dtype != "bfloat16":
                yield f"set engine.dtype=bfloat16 (now {engine.dtype})"
        case "trainer/copies":
            yield "choose a smaller model"


_STATE = {f"trainer/{name}" for name in ("weights", "moments", "gradients", "pages", "spare_pages", "copies")}


def _lower_on_host(part: str, config: RunConfig) -> Iterator[str]:
    """Cutting a state over more ranks of one host leaves the host as full as it was."""
    if part in _STATE:
        yield "choose a smaller model, or spread trainer.ranks over more hosts"
    else:
        yield from _lower(part, config)
