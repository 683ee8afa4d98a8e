"""Rollout engines that are servers: somebody else's, by their addresses, and SGLang, started by the run."""

from typing import Annotated, ClassVar, Literal, Self

from pydantic import AfterValidator, BeforeValidator, Field, model_validator

from tidemill.config.engine import EngineSettings
from tidemill.config.kinds import Interval, Label, OptionalPath, Positive, Seconds, Texts, as_tuple, refuse
from tidemill.units import parse_bytes

__all__ = ["RemoteEngineSettings", "ServerEngineSettings", "SglangEngineSettings"]


def _some_urls(value: tuple[str, ...]) -> tuple[str, ...]:
    if not value:
        raise refuse('needs at least one address; for example ["http://10.0.0.2:8000"]')
    for url in value:
        if "@" in url:
            raise refuse("holds a user or a password; put a token in the variable that engine.token_env names")
        if not url.startswith(("http://", "https://")):
            raise refuse(f"{url} is no address; write http://host:port or https://host/path")
    if len(set(value)) < len(value):
        raise refuse("names a server more than once")
    return value


Urls = Annotated[
    tuple[str, ...], BeforeValidator(as_tuple), AfterValidator(_some_urls), Label("list of addresses, one at least")
]
Variable = Annotated[
    str, Field(pattern=r"^([A-Za-z_][A-Za-z0-9_]*)?$"), Label('name of an environment variable, "" for none')
]


def _bytes(value: object) -> object:
    try:
        return parse_bytes(value) if isinstance(value, str) else value
    except ValueError as error:
        raise refuse(str(error)) from error


NoneOrSize = Annotated[
    int, Field(ge=0), BeforeValidator(_bytes, json_schema_input_type=int | str), Label("size, 0 for none")
]


class ServerEngineSettings(EngineSettings):
    """What engines have that are servers."""

    float32_mismatch: ClassVar[float] = 0.05

    weights_folder: OptionalPath = None
    """Where weights are laid for the servers, one safetensors file of the whole model. They must see it under the same
    path. Empty is shared memory, for servers of this machine."""
    probe: Interval = 1
    """Syncs from one probe to the next: before such a version is served, log-probabilities that a server gives a few
    tokens are compared with a forward on the CPU over the weights that it was given. 0 trusts the servers."""
    probe_tolerance: Positive = 0.25
    """Mean difference of log-probabilities, in nats, that a probe allows: kernels in bfloat16 differ by some 0.04."""
    seeded: bool = True
    """Send a seed with each request, so that equal seeds give equal answers as far as the server keeps to them."""
    request_deadline: Seconds = 600.0
    """Longest that a server may take for one answer before the request is asked of another."""
    sync_deadline: Seconds = 600.0
    """Longest that a server may take to load weights, to sleep or to wake."""
    health_every: Seconds = 5.0
    """Time between two looks at each server while it generates: whether it is well, or back."""
    recovery: Seconds = 300.0
    """Longest that a rollout goes on while no server is well."""


class RemoteEngineSettings(ServerEngineSettings):
    """Servers that run already, of vLLM or SGLang, by their addresses."""

    implementation: ClassVar[str] = "tidemill.engines.remote.build:remote_engine"
    elsewhere: ClassVar[bool] = True

    urls: Annotated[Urls, Field(examples=[["http://10.0.0.2:8000"]])]
    """Addresses of the servers. All serve one model; samples of one prompt go to one of them."""
    server: Literal["vllm", "sglang"] = "vllm"
    """Which kind they are."""
    served_model: str = ""
    """The name under which they serve the model; empty takes any."""
    token_env: Annotated[Variable, Field(examples=["ENGINE_TOKEN"])] = ""
    """Environment variable with the token that the servers want, which is sent as a bearer token and never written."""
    cache_memory: NoneOrSize = 0
    """For servers on the trainer's own GPU, what the cache of each takes there: they then sleep and wake in turn with
    the trainer. 0 is for servers on GPUs of their own, which never sleep."""

    @model_validator(mode="after")
    def _who_sleeps_can_say_so(self) -> Self:
        if self.cache_memory and self.server == "sglang":
            raise refuse(
                "cache_memory is for vLLM: a server of SGLang that runs already does not say whether it sleeps, and "
                'ends when it is put to sleep twice; use engine.use = "sglang", whose server is the run\'s own'
            )
        return self


class SglangEngineSettings(ServerEngineSettings):
    """SGLang, a server process on the engine's GPU, started and ended by the run."""

    implementation: ClassVar[str] = "tidemill.engines.sglang.build:sglang_engine"

    command: Texts = ()
    """What starts its server, for example `["/opt/sglang/bin/python", "-m", "sglang.launch_server"]`, since it may need
    other versions of libraries; empty is this Python. Options of the run are added."""
    options: Texts = ()
    """Further options of the server, as on its command line."""
    log: OptionalPath = None
    """File that its output is added to; empty is one in the folder for temporary files, which messages name."""
    memory: Annotated[float, Field(gt=0, lt=1)] = 0.5
    """Part of the GPU's memory that weights and cache of the server take together."""
    reproducible: bool = False
    """Let the draws of a request follow its seed alone, whatever else is asked at the time. SGLang is slower then, and
    does not know it for every model."""
    start_deadline: Seconds = 900.0
    """Longest that a server may take to start."""
    recovery: Seconds = 1800.0
    """Longest that a rollout goes on while the server is not well: starting it again takes time."""
    restarts: Annotated[int, Field(ge=0)] = 3
    """How often a server that died is started again in a run. 0 is never."""
