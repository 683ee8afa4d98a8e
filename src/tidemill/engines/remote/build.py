"""An engine of servers that run already, from its settings."""

from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from tidemill.contracts.events import Emit
from tidemill.engines.remote.client import Client
from tidemill.engines.remote.dialect import Dialect
from tidemill.engines.remote.dispatch import Watch
from tidemill.engines.remote.engine import ServerEngine
from tidemill.engines.remote.parts import join, model_facts, token_from
from tidemill.engines.remote.replica import Expected, Patience, Replica
from tidemill.engines.remote.sglang_dialect import SglangDialect
from tidemill.engines.remote.vllm_dialect import VllmDialect
from tidemill.errors import ConfigError, EngineError, TidemillError

__all__ = ["CONTROL", "remote_engine"]

# Seconds for a short question: SGLang's own look at its health may take 20.
CONTROL = 30.0
_DIALECTS: dict[str, type[Dialect]] = {"vllm": VllmDialect, "sglang": SglangDialect}


def remote_engine(
    *,
    model: Path,
    dtype: Literal["float32", "bfloat16"],
    max_batch: int,
    emit: Emit,
    urls: tuple[str, ...],
    server: Literal["vllm", "sglang"] = "vllm",
    served_model: str = "",
    token_env: str = "",
    cache_memory: int = 0,
    weights_folder: Path | None = None,
    probe: int = 1,
    probe_tolerance: float = 0.25,
    seeded: bool = True,
    request_deadline: float = 600.0,
    sync_deadline: float = 600.0,
    health_every: float = 5.0,
    recovery: float = 300.0,
    device: str = "cpu",
    kv_tokens: int = 0,
    stop_on_leak: bool = True,
) -> ServerEngine:
    """Every server is asked what it serves. `device` is where weights come from; `stop_on_leak` is for others.

    Raises ConfigError for a server that serves another model, EngineError when one is not there.
    """
    facts = model_facts(model)
    token = token_from(token_env)
    patience = Patience(answer=request_deadline, transition=sync_deadline, control=min(CONTROL, request_deadline))

    def make(dialect: Dialect, expected: Expected) -> list[Replica]:
        replicas = []
        for index, url in enumerate(urls):
            name = f"engine-{index} at {url}"
            client = Client(url, token=token, named=name)
            replicas.append(
                Replica(name=name, client=client, dialect=dialect, expected=expected, patience=patience, seeded=seeded)
            )
        _introduce(replicas, served_model)
        for replica in replicas if cache_memory else ():
            replica.take_turns()
        return replicas

    return join(
        facts,
        make,
        dialect=_DIALECTS[server](),
        dtype=dtype,
        max_batch=max_batch,
        longest=kv_tokens // max_batch or facts.context,
        device=device,
        weights_folder=weights_folder,
        probe=probe,
        probe_tolerance=probe_tolerance,
        watch=Watch(every=health_every, recovery=recovery),
        cache_bytes=cache_memory or None,
        emit=emit,
    )


def _introduce(replicas: Sequence[Replica], served_model: str) -> None:
    """All at once in the message: who starts a run wants to know of every server that is missing."""
    problems: list[TidemillError] = []
    for replica in replicas:
        try:
            replica.introduce(served_model)
        except TidemillError as error:
            problems.append(error)
    if problems:
        kind = ConfigError if all(isinstance(error, ConfigError) for error in problems) else EngineError
        raise kind("; ".join(str(error) for error in problems))
