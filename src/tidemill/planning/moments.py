"""Which parts are where at each moment of a run."""

from collections.abc import Mapping
from dataclasses import dataclass

from tidemill.planning.choice import CONTEXT_BYTES, Choice
from tidemill.planning.generation import working_bytes
from tidemill.planning.model_folder import Model
from tidemill.planning.passes import optimizer_parts, pass_parts
from tidemill.planning.setup import Setup
from tidemill.planning.tenants import Tenants
from tidemill.units import MIB

__all__ = ["Moment", "Seat", "device_seats", "host_moments"]

Parts = Mapping[str, int]

_NAMES = ("start", "rollout", "forward and backward", "optimizer", "save", "hand-over", "asleep")
_BUCKET = 256 * MIB  # of weights on their way to another process
_SUMS = 64 * MIB  # of a checksum on a GPU
_PROCESS = 350 * MIB  # Python, PyTorch and transformers in host memory, measured on a CPU


@dataclass(frozen=True, kw_only=True)
class Moment:
    """`parts` are bytes by `owner/part`."""

    name: str
    parts: Parts

    @property
    def bytes(self) -> int:
        """Of all parts."""
        return sum(self.parts.values())


@dataclass(frozen=True, kw_only=True)
class Seat:
    """`count` equal devices, of which `name` says whose they are."""

    name: str
    count: int
    moments: tuple[Moment, ...]

    @property
    def largest(self) -> Moment:
        """The fullest moment."""
        return max(self.moments, key=lambda moment: moment.bytes)


@dataclass(frozen=True, kw_only=True)
class _Run:
    """All that moments depend on. `groups` are a rank's bytes of process groups."""

    model: Model
    setup: Setup
    tenants: Tenants
    choice: Choice
    groups: int

    def names(self) -> tuple[str, ...]:
        """Who never sleeps has no such moment, and a replay generates nothing."""
        gone = set() if self.choice.turns else {"asleep"}
        return tuple(name for name in _NAMES if name not in (gone if self.setup.replicas else {"asleep", "rollout"}))

    def trainer(self, name: str) -> Parts:
        """Of one rank."""
        asleep = self.choice.turns and name in ("rollout", "asleep")
        groups = 0 if asleep and self.choice.parks else self.groups
        return _named("trainer", {} if asleep else self._awake(name)) | ({"trainer/groups": groups} if groups else {})

    def _awake(self, name: str) -> Parts:
        state = self.tenants.state
        kept = {"weights": state.weights, "moments": state.moments}
        match name:
            case "start":
                return kept | {"loading": max(state.slabs)}
            case "forward and backward":
                works = [pass_parts(self.model, state, work) for work in self.setup.phases]
                fullest = max(works, key=lambda parts: sum(parts.values()))
                return {**kept, **fullest}
            case "optimizer":
                return {**kept, **optimizer_parts(state)}
            case "hand-over":
                return kept | {"staging": self._staging()} if self.setup.replicas else kept
        return kept

    def engine(self, name: str) -> Parts:
        """Of one replica. The cache is there while answers are generated, whoever sleeps."""
        weights = {"weights": self.tenants.engine_weights}
        if name == "rollout":
            cache = self.tenants.cache
            working = working_bytes(self.model.decoder, self.setup.generation, cache=cache)
            return _named("engine", weights | {"cache": cache, "working": working})
        away = not self.setup.replicas or name == "start" or (self.choice.turns and name != "hand-over")
        return {} if away else _named("engine", weights)

    def bucket(self) -> int:
        """Of weights in the engine's dtype: the largest goes alone."""
        size = self.setup.generation.itemsize
        return max(min(_BUCKET, size * self.model.parameters), size * self.model.largest)

    def _staging(self) -> int:
        size, on_gpu = self.setup.generation.itemsize, self.setup.device == "cuda"
        if self.setup.together:
            return (size * self.model.largest if size < 4 else 0) + (_SUMS if on_gpu else 0)
        buckets = 2 if self.setup.shared or not on_gpu else 1
        return buckets * self.bucket() + (_SUMS if on_gpu else 0) + self._gathered()

    def _gathered(self) -> int:
        """Whole weights, float32, on the way from several ranks: a layer or a word matrix, and this rank's part."""
        shards = self.setup.phases[0].shards
        whole = 4 * max(self.model.largest, *self.model.layers())
        return whole + whole // shards if shards > 1 else 0


def _named(owner: str, parts: Parts) -> dict[str, int]:
    return {f"{owner}/{part}": count for part, count in parts.items()}


def device_seats(model: Model, setup: Setup, tenants: Tenants, choice: Choice, *, groups: int) -> tuple[Seat, ...]:
    """The GPUs of a run, none on a CPU. Of GPUs that trainer and engine share, the fullest."""
    if setup.device == "cpu":
        return ()
    run = _Run(model=model, setup=setup, tenants=tenants, choice=choice, groups=groups)
    if setup.shared:
        count = max(setup.ranks, setup.replicas)
        return (_seat(run, "trainer and engine" if setup.replicas else "trainer", count, setup.contexts),)
    return (_seat(run, "trainer", setup.ranks, 1), _seat(run, "engine", setup.replicas, 1))


def _seat(run: _Run, name: str, count: int, contexts: int) -> Seat:
    moments = []
    for moment in run.names():
        parts: dict[str, int] = {}
        if "trainer" in name:
            parts |= run.trainer(moment)
        if "engine" in name:
            parts |= run.engine(moment)
        moments.append(Moment(name=moment, parts=parts | {"context": contexts * CONTEXT_BYTES}))
    return Seat(name=name, count=count, moments=tuple(moments))


def host_moments(model: Model, setup: Setup, tenants: Tenants, choice: Choice) -> tuple[Moment, ...]:
    """Host memory of all processes, as if on one host; on a CPU what they compute with, too."""
    run = _Run(model=model, setup=setup, tenants=tenants, choice=choice, groups=0)
    return tuple(Moment(name=name, parts=_host_parts(run, name)) for name in run.names())


def _host_parts(run: _Run, name: str) -> Parts:
    setup, tenants = run.setup, run.tenants
    parts = {
        "trainer/pages": setup.ranks * tenants.arena.pages,
        "trainer/spare_pages": setup.ranks * tenants.arena.spares,
        "processes": setup.processes * _PROCESS,
    }
    if setup.replicas:
        parts["engine/buffers"] = setup.replicas * tenants.engine_host
    if setup.device == "cpu":
        parts |= {part: setup.ranks * count for part, count in run.trainer(name).items()}
        parts |= {part: setup.replicas * count for part, count in run.engine(name).items()}
    elif name == "hand-over" and not setup.together and not setup.shared:
        parts["trainer/staging"] = setup.ranks * 2 * run.bucket()
    return parts
