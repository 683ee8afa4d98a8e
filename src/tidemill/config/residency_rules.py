"""What settings must agree on where trainer and engine share devices: who sleeps, and what that asks for."""

from collections.abc import Iterator

from tidemill.config.cluster import RayClusterSettings
from tidemill.config.findings import Finding, Rule
from tidemill.config.run import RunConfig

__all__ = ["RESIDENCY_RULES"]


def _offloads(config: RunConfig) -> dict[str, str]:
    """The settings that replace the budget, by path."""
    asked = {
        "trainer.offload": config.trainer.offload,
        "engine.offload": config.engine.offload,
        "residency.offload": config.residency.offload,
    }
    return {path: offload for path, offload in asked.items() if offload != "auto"}


def devices_of_their_own_are_not_shared(config: RunConfig) -> Iterator[Finding]:
    """Trainer and engine that share no device have no budget to share, and neither ever sleeps."""
    if not isinstance(config.cluster, RayClusterSettings) or config.cluster.placement != "separate":
        return
    without = 'has no effect with cluster.placement = "separate", where trainer and engine both stay awake'
    for path in (path for path, offload in _offloads(config).items() if offload == "always"):
        yield Finding((path, "cluster.placement"), f'{without}; leave it at "auto"')
    if config.residency.budget != "auto":
        yield Finding(("residency.budget", "cluster.placement"), f'{without}; leave it at "auto"')


def a_budget_is_for_deciding(config: RunConfig) -> Iterator[Finding]:
    """`always` and `never` replace the budget."""
    for path, offload in _offloads(config).items() if config.residency.budget != "auto" else ():
        yield Finding(
            ("residency.budget", path), f'has no effect with {path} = "{offload}"; leave one of the two at "auto"'
        )


def one_budget_serves_trainer_and_engine(config: RunConfig) -> Iterator[Finding]:
    """Both overrides replace the one budget, so they cannot differ."""
    if {config.trainer.offload, config.engine.offload} == {"always", "never"}:
        yield Finding(
            ("engine.offload", "trainer.offload"),
            f'contradicts trainer.offload = "{config.trainer.offload}": one budget serves both; set one to "auto"',
        )


def addresses_are_kept_on_gpus(config: RunConfig) -> Iterator[Finding]:
    """Only a GPU has addresses that outlive their memory."""
    if config.trainer.keep_addresses and config.run.device == "cpu":
        yield Finding(
            ("trainer.keep_addresses", "run.device"),
            "only GPUs can keep addresses through sleep, and nothing on a CPU needs them; set it to false, or "
            'run.device = "cuda"',
        )


def groups_are_given_back_in_sleep(config: RunConfig) -> Iterator[Finding]:
    """Who never sleeps gives none back. One rank has none, which is no contradiction: a run may resume with fewer."""
    if config.residency.park_groups != "always":
        return
    path, without = "residency.park_groups", "has no effect with"
    own = {"trainer.offload": config.trainer.offload, "engine.offload": config.engine.offload}
    deciding = {asked: mode for asked, mode in own.items() if mode != "auto"}
    asked, mode = next(iter(deciding.items()), ("residency.offload", config.residency.offload))
    if mode == "never":
        yield Finding((path, asked), f'{without} {asked} = "never", with which nobody sleeps; set it to "auto"')
    if isinstance(config.cluster, RayClusterSettings) and config.cluster.placement == "separate":
        yield Finding(
            (path, "cluster.placement"),
            f'{without} cluster.placement = "separate", where trainer and engine both stay awake; set it to "auto"',
        )


RESIDENCY_RULES: tuple[Rule, ...] = (
    devices_of_their_own_are_not_shared,
    a_budget_is_for_deciding,
    one_budget_serves_trainer_and_engine,
    addresses_are_kept_on_gpus,
    groups_are_given_back_in_sleep,
)
