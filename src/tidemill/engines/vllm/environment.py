"""What vLLM reads from its surroundings: variables that must stand before its first import, and where its log goes."""

import contextlib
import importlib
import logging
import os
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from tidemill.contracts.events import Emit, Notice
from tidemill.errors import PluginError

__all__ = ["import_vllm", "left_alone"]

# Without these the engine would be another one than is promised, or would tell others about its use.
_OURS = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_DO_NOT_TRACK": "1",
    "VLLM_CONFIGURE_LOGGING": "0",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
}
# What a user may have reasons to set otherwise. FlashInfer's sampler tells no log-probs of what it kept, and is built
# when it is first used. The draws of the first model runner are ours; those of the second one are its own.
_DEFAULTS = {"VLLM_USE_FLASHINFER_SAMPLER": "0", "VLLM_USE_V2_MODEL_RUNNER": "0", "VLLM_LOGGING_LEVEL": "ERROR"}


def import_vllm(emit: Emit) -> None:
    """Import vLLM under our variables; errors in its log become notices. Raises PluginError when that fails."""
    os.environ.update(_OURS)
    for name, value in _DEFAULTS.items():
        os.environ.setdefault(name, value)
    try:
        importlib.import_module("vllm")
    except (ImportError, RuntimeError) as error:
        raise PluginError(
            f"cannot use engine.use = vllm: vLLM cannot be imported ({error}); install a build that fits torch "
            f"{torch.__version__}, and on a CPU none of torchvision, torchaudio, torchcodec; docs/engines.md says how"
        ) from error
    log = logging.getLogger("vllm")
    log.setLevel(os.environ["VLLM_LOGGING_LEVEL"])
    log.propagate = False
    log.handlers = [_Notices(emit)]


class _Notices(logging.Handler):
    """Tells what vLLM logs."""

    def __init__(self, emit: Emit) -> None:
        super().__init__()
        self._emit = emit

    def emit(self, record: logging.LogRecord) -> None:
        """As a notice; a warning from level WARNING on."""
        level: Any = "warning" if record.levelno >= logging.WARNING else "info"
        self._emit(Notice(text=f"vLLM: {record.getMessage()}", level=level))


@contextlib.contextmanager
def left_alone() -> Iterator[None]:
    """What vLLM changes in this process as it starts, and a trainer beside it relies on, is as before behind the
    block: the state of every random generator, how floats are multiplied, and the count of threads, which its CPU
    workers forbid to change.
    """
    states = random.getstate(), np.random.get_state()
    set_threads = torch.set_num_threads
    devices = list(range(torch.cuda.device_count()))
    threads, precision = torch.get_num_threads(), torch.get_float32_matmul_precision()
    with torch.random.fork_rng(devices=devices):
        try:
            yield
        finally:
            vars(torch)["set_num_threads"] = set_threads
            torch.set_num_threads(threads)
            torch.set_float32_matmul_precision(precision)
            random.setstate(states[0])
            np.random.set_state(states[1])
