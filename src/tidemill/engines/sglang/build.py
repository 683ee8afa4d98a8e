"""SGLang as the engine of one GPU: a server process of the run, spoken to over HTTP on this machine.

The server gives its memory back while the trainer works and discards its weights with it; each version comes from a
safetensors file in shared memory. SGLang may need versions of libraries that a trainer does not: its command may be of
another environment.
"""

import os
import sys
import tempfile
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Literal

import torch

from tidemill.contracts.events import Emit
from tidemill.engines.remote.build import CONTROL
from tidemill.engines.remote.client import Client
from tidemill.engines.remote.dialect import Dialect
from tidemill.engines.remote.dispatch import Watch
from tidemill.engines.remote.engine import ServerEngine
from tidemill.engines.remote.parts import join, model_facts
from tidemill.engines.remote.replica import Expected, Patience, Replica
from tidemill.engines.remote.sglang_dialect import SglangDialect
from tidemill.engines.sglang.process import ServerProcess

__all__ = ["server_options", "sglang_engine"]

_MODULE = "sglang.launch_server"
# What another Python must not take over from this one.
_OWN = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV", "TIDEMILL_FAULTS")


def server_options(
    *, model: Path, port: int, dtype: str, memory: float, max_batch: int, reproducible: bool, options: Sequence[str]
) -> list[str]:
    """The server's command line behind its program. `options` come last and win."""
    words = ["--model-path", str(model), "--host", "127.0.0.1", "--port", str(port), "--dtype", dtype]
    words += ["--mem-fraction-static", str(memory), "--max-running-requests", str(max_batch), "--enable-memory-saver"]
    return [*words, *(["--enable-deterministic-inference"] if reproducible else []), *options]


def sglang_engine(
    *,
    model: Path,
    dtype: Literal["float32", "bfloat16"],
    max_batch: int,
    emit: Emit,
    command: tuple[str, ...] = (),
    options: tuple[str, ...] = (),
    log: Path | None = None,
    memory: float = 0.5,
    reproducible: bool = False,
    start_deadline: float = 900.0,
    restarts: int = 3,
    weights_folder: Path | None = None,
    probe: int = 1,
    probe_tolerance: float = 0.25,
    seeded: bool = True,
    request_deadline: float = 600.0,
    sync_deadline: float = 600.0,
    health_every: float = 5.0,
    recovery: float = 1800.0,
    device: str = "cuda",
    kv_tokens: int = 0,
    stop_on_leak: bool = True,
) -> ServerEngine:
    """Starts the server and puts it to sleep. `stop_on_leak` is for engines in this process.

    Raises EngineError, with the end of the server's log, when it does not come up.
    """
    facts = model_facts(model)
    words = partial(server_options, model=model, dtype=dtype, memory=memory, max_batch=max_batch)
    start = partial(
        ServerProcess,
        lambda port: [*_program(command), *words(port=port, reproducible=reproducible, options=options)],
        name="SGLang",
        log=log or Path(tempfile.gettempdir()) / f"tidemill-sglang-{os.getpid()}.log",
        deadline=start_deadline,
        restarts=restarts,
        emit=emit,
    )
    patience = Patience(answer=request_deadline, transition=sync_deadline, control=CONTROL)
    total = torch.cuda.mem_get_info()[1] if device == "cuda" else 0
    return join(
        facts,
        lambda dialect, expected: [_asleep(start, dialect, expected, patience, seeded=seeded)],
        dialect=SglangDialect(),
        dtype=dtype,
        max_batch=max_batch,
        longest=kv_tokens // max_batch or facts.context,
        device=device,
        weights_folder=weights_folder,
        probe=probe,
        probe_tolerance=probe_tolerance,
        watch=Watch(every=health_every, recovery=recovery),
        cache_bytes=max(0, int(memory * total) - facts.bytes_in(dtype)),
        emit=emit,
    )


def _program(command: Sequence[str]) -> list[str]:
    """`command` in an environment of its own, or SGLang of this Python."""
    unset = [word for name in _OWN for word in ("-u", name)]
    return ["env", *unset, *command] if command else [sys.executable, "-m", _MODULE]


def _asleep(
    start: Callable[..., ServerProcess], dialect: Dialect, expected: Expected, patience: Patience, *, seeded: bool
) -> Replica:
    """A replica of a process of its own, found to serve the run's model. Ends the process when it does not."""
    process = start(well=lambda client: dialect.healthy(client, deadline=CONTROL))
    client = Client(process.url, named=f"engine at {process.url}")
    replica = Replica(
        name=client.named,
        client=client,
        dialect=dialect,
        expected=expected,
        patience=patience,
        seeded=seeded,
        process=process,
    )
    try:
        replica.introduce()
        replica.take_turns()
    except BaseException:
        replica.close()
        raise
    return replica
