"""No device operation without a lease: every method of every backend is classified, called, and read.

Methods are found by walking the protocols and the classes, so that a new one fails here until it is in a table.
"""

import ast
import functools
import inspect
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.cluster.local_group import LocalGroup
from tests.house.lease_table import EXTRA_FREE, EXTRA_LEASED, FREE, LEASED, SERVICE_FREE, SERVICE_LEASED

import tidemill
from tidemill.cluster.engine_proxy import EngineProxy
from tidemill.cluster.engine_service import EngineService
from tidemill.cluster.tenant_proxy import Deadlines
from tidemill.cluster.trainer_proxy import TrainerProxy
from tidemill.cluster.trainer_service import TrainerService
from tidemill.contracts.engine import RolloutEngine
from tidemill.contracts.events import Emit, ignore
from tidemill.contracts.footprint import Part
from tidemill.contracts.state import PolicyVersion
from tidemill.contracts.trainer import RankTrainer, Trainer
from tidemill.contracts.workers import Place
from tidemill.engines.remote.engine import ServerEngine
from tidemill.engines.replay.engine import ReplayEngine
from tidemill.engines.transformers.engine import TransformersEngine
from tidemill.engines.vllm.engine import VllmEngine
from tidemill.errors import EngineError, ResidencyError
from tidemill.testing.fakes.policy import FakeEngine, FakeTrainer
from tidemill.testing.fakes.rank_trainer import FakeRankTrainer, build_fake_rank
from tidemill.testing.suites.trainer import copied, same
from tidemill.testing.tiny import make_tiny_model
from tidemill.trainers.common.schedule import PhaseSettings
from tidemill.trainers.fsdp.trainer import FsdpTrainer

SOURCE = Path(tidemill.__file__).parent
DEADLINES = Deadlines(work=20.0, transition=20.0)
RL = PhaseSettings(
    lr=1e-3,
    betas=(0.9, 0.95),
    eps=1e-8,
    weight_decay=0.0,
    schedule="constant",
    warm_up_steps=0,
    min_ratio=0.0,
    total_steps=10,
)
BACKENDS: dict[type, Any] = {
    FsdpTrainer: RankTrainer,
    FakeRankTrainer: RankTrainer,
    FakeTrainer: Trainer,
    TrainerProxy: Trainer,
    TransformersEngine: RolloutEngine,
    FakeEngine: RolloutEngine,
    EngineProxy: RolloutEngine,
}
TRAINERS = [kind for kind, protocol in BACKENDS.items() if protocol is not RolloutEngine]
# Read only: to make one takes vLLM, or servers. That it refuses without a lease is in the suite for engines.
READ_ONLY = [VllmEngine, ServerEngine]
IN_PROCESS = [kind for kind in BACKENDS if kind not in (TrainerProxy, EngineProxy)]


def members(protocol: Any) -> set[str]:
    """The public names that a protocol and those it extends ask for."""
    kinds = [kind for kind in protocol.__mro__ if kind.__module__.startswith("tidemill.")]
    return {name for kind in kinds for name in vars(kind) if not name.startswith("_")}


def public(kind: type) -> set[str]:
    return {name for name in dir(kind) if not name.startswith("_")}


def build_trainer(model: Path, place: Place, emit: Emit) -> FsdpTrainer:
    return FsdpTrainer(
        model=model,
        place=place,
        compute_dtype="float32",
        tokens_per_micro_batch=40,
        minibatches=1,
        recompute=False,
        max_grad_norm=1.0,
        phases={"rl": RL},
        page_bytes=1 << 16,
        emit=emit,
    )


def build_engine(model: Path, place: Place, emit: Emit) -> TransformersEngine:
    return TransformersEngine(model=model, device="cpu", dtype="float32", max_batch=2, kv_tokens=64, emit=emit)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model"), hidden=16, heads=2, kv_heads=1)


@pytest.fixture
def make(model: Path) -> Callable[[type], Any]:
    """A backend, awake in all its parts, with contents, and its gate shut."""

    def made(kind: type) -> Any:
        makers: dict[type, Callable[[], Any]] = {
            FsdpTrainer: lambda: build_trainer(model, Place(), ignore),
            FakeRankTrainer: lambda: build_fake_rank(Place(), ignore),
            TrainerProxy: lambda: TrainerProxy(
                LocalGroup("trainer", [TrainerService(build_fake_rank, Place(), ignore)]), deadlines=DEADLINES
            ),
            TransformersEngine: lambda: build_engine(model, Place(), ignore),
            EngineProxy: lambda: EngineProxy(
                LocalGroup("engine", [EngineService(functools.partial(build_engine, model), Place(), ignore)]),
                deadlines=DEADLINES,
                emit=ignore,
                max_batch=2,
            ),
        }
        tenant = makers.get(kind, kind)()
        wake(tenant)
        return tenant

    return made


def wake(tenant: Any) -> None:
    tenant.wake_up(Part.ALL)
    if "load_pretrained" in dir(tenant):
        tenant.gate.open(Part.WEIGHTS)
        tenant.load_pretrained(PolicyVersion(1, 0))
        tenant.gate.close(Part.ALL)


def contents(tenant: Any) -> Any:
    """What a lease would show: to see that a refused call has changed nothing."""
    tenant.gate.open(Part.ALL)
    try:
        if "weight_checksums" in dir(tenant):
            return tenant.version, dict(tenant.weight_checksums())
        snapshot = tenant.snapshot()
        saved = copied(snapshot)
        snapshot.release()
        return saved.extra, {name: bytes(tensor.data) for name, tensor in saved.tensors.items()}
    finally:
        tenant.gate.close(Part.ALL)


def leased(kind: type) -> Iterator[tuple[str, Part, tuple[Any, ...]]]:
    """The methods of a backend that need a lease, with the parts that they need and arguments."""
    table = {**LEASED, **EXTRA_LEASED}
    yield from ((name, *table[name]) for name in sorted(public(kind) & set(table)))


def refuses(tenant: Any, method: str, arguments: tuple[Any, ...]) -> None:
    with pytest.raises(ResidencyError, match=tenant.name):
        getattr(tenant, method)(*arguments)


# The tables


def test_every_member_of_the_protocols_is_classified_once() -> None:
    wanted = members(RankTrainer) | members(Trainer) | members(RolloutEngine)
    assert {"step", "update", "generate", "sleep", "snapshot", "park", "named_weights"} <= wanted
    assert wanted == set(LEASED) | set(FREE)
    assert not set(LEASED) & set(FREE)


@pytest.mark.parametrize("kind", BACKENDS, ids=lambda kind: kind.__name__)
def test_a_backend_has_its_protocols_members_and_no_public_method_that_is_unclassified(
    kind: type, make: Callable[[type], Any]
) -> None:
    tenant = make(kind)
    assert [name for name in members(BACKENDS[kind]) if name not in dir(tenant)] == []
    extra = public(kind) - members(BACKENDS[kind])
    assert extra <= set(EXTRA_LEASED) | set(EXTRA_FREE) | set(LEASED) | set(FREE), "say which need a lease"


def test_whatever_trains_or_generates_is_known_here() -> None:
    found = {
        node.name
        for path in SOURCE.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ClassDef)
        for part in node.body
        if isinstance(part, ast.FunctionDef) and part.name in ("log_probs", "generate")
    }
    contracts, services = {"Trainer", "RolloutEngine"}, {"TrainerService", "EngineService"}
    inner, empty = {"Passes"}, {"ReplayEngine"}
    assert found == {kind.__name__ for kind in [*BACKENDS, *READ_ONLY]} | contracts | services | inner | empty


# Called without a lease


@pytest.mark.parametrize("asleep", [False, True], ids=["awake", "asleep"])
@pytest.mark.parametrize("kind", BACKENDS, ids=lambda kind: kind.__name__)
def test_without_a_lease_every_method_that_needs_one_is_refused_before_it_touches_anything(
    kind: type, asleep: bool, make: Callable[[type], Any]
) -> None:
    tenant = make(kind)
    if asleep:
        tenant.sleep()
    before = () if asleep else contents(tenant)
    calls = len(tenant.group.calls) if "group" in dir(tenant) else 0
    names = [name for name, _, arguments in leased(kind) if refuses(tenant, name, arguments) is None]
    assert len(names) >= 5
    assert calls == (len(tenant.group.calls) if "group" in dir(tenant) else 0), "a worker heard of it"
    assert before == () if asleep else contents(tenant) == before


@pytest.mark.parametrize("kind", BACKENDS, ids=lambda kind: kind.__name__)
def test_a_lease_of_other_parts_is_none(kind: type, make: Callable[[type], Any]) -> None:
    tenant = make(kind)
    for name, needed, arguments in leased(kind):
        for part in needed:
            tenant.gate.open(Part.ALL & ~part)
            refuses(tenant, name, arguments)
            tenant.gate.close(Part.ALL)


@pytest.mark.parametrize("kind", [TransformersEngine, EngineProxy, TrainerProxy], ids=lambda kind: kind.__name__)
def test_what_sleeps_is_refused_even_if_somebody_forced_the_gate(kind: type, make: Callable[[type], Any]) -> None:
    tenant = make(kind)
    tenant.sleep()
    tenant.gate.open(Part.ALL)
    for name, _, arguments in leased(kind):
        refuses(tenant, name, arguments)


def test_a_replay_engine_has_nothing_that_a_lease_could_guard() -> None:
    engine = ReplayEngine()
    assert members(RolloutEngine) <= set(dir(engine))
    assert engine.footprint(Part.ALL) == engine.host_bytes() == 0
    assert engine.resident() == Part.NONE
    for name in ("generate", "load_pretrained"):
        with pytest.raises(EngineError, match="built no engine"):
            getattr(engine, name)(*([[]] * (1 + (name == "generate"))))


# Snapshots: of the host copy without a lease, of the device never


@pytest.mark.parametrize("kind", TRAINERS, ids=lambda kind: kind.__name__)
def test_a_snapshot_needs_the_lease_unless_the_host_copy_is_what_the_trainer_is(
    kind: type, make: Callable[[type], Any]
) -> None:
    trainer = make(kind)
    with pytest.raises(ResidencyError):
        trainer.snapshot()
    before = contents(trainer)
    trainer.sleep()
    snapshot = trainer.snapshot()
    saved = copied(snapshot)
    snapshot.release()
    assert before == (saved.extra, {name: bytes(tensor.data) for name, tensor in saved.tensors.items()})
    wake(trainer)
    trainer.gate.open(Part.ALL)
    trainer.begin("rl")
    trainer.gate.close(Part.ALL)
    with pytest.raises(ResidencyError):
        trainer.snapshot()
    trainer.sleep()
    again = trainer.snapshot()
    assert not same(copied(again), saved)
    again.release()


# Services: the worker's own gate


@pytest.fixture(params=["trainer", "engine"])
def service(request: pytest.FixtureRequest, model: Path) -> Any:
    if request.param == "trainer":
        return TrainerService(functools.partial(build_trainer, model), Place(), ignore)
    return EngineService(functools.partial(build_engine, model), Place(), ignore)


def test_every_method_of_a_service_is_classified_once(service: Any) -> None:
    assert not set(SERVICE_LEASED) & set(SERVICE_FREE)
    assert public(type(service)) <= set(SERVICE_LEASED) | set(SERVICE_FREE)


@pytest.mark.parametrize("asleep", [False, True], ids=["awake", "asleep"])
def test_a_service_refuses_what_the_drivers_gate_does_not_allow_before_it_touches_anything(
    service: Any, asleep: bool
) -> None:
    service.shift("wake_up", Part.ALL)
    if asleep:
        service.shift("sleep")
    names = public(type(service)) & set(SERVICE_LEASED)
    assert len(names) >= 6
    for name in sorted(names):
        needed, arguments = SERVICE_LEASED[name]
        for allowed in (Part.NONE, *(Part.ALL & ~part for part in needed)):
            with pytest.raises(ResidencyError, match="lease"):
                service.use(allowed, name, *arguments)


def test_a_service_shuts_its_gate_behind_every_call(service: Any) -> None:
    service.use(Part.ALL, "stand")
    assert service._tenant.gate.allowed == Part.NONE
    with pytest.raises(TypeError):
        service.use(Part.ALL, "stand", 1)
    assert service._tenant.gate.allowed == Part.NONE


def test_ways_around_a_proxys_methods_end_at_the_workers_gate(make: Callable[[type], Any]) -> None:
    trainer, engine = make(TrainerProxy), make(EngineProxy)
    for proxy, name, arguments in ((trainer, "begin", ("rl",)), (engine, "weight_checksums", ())):
        with pytest.raises(ResidencyError):
            proxy.each(name, [arguments])
        with pytest.raises(ResidencyError):
            proxy.start(0, name, *arguments).result(5)
        with pytest.raises(ResidencyError):
            proxy.end_each(name, proxy.start_each(name, [arguments]))


# Read: the check comes first


CHECKS = {"self._gate.check", "self.gate.check", "self._need", "self._check"}


def first_statement(function: Any) -> ast.stmt:
    (tree,) = ast.parse(textwrap.dedent(inspect.getsource(function))).body
    assert isinstance(tree, ast.FunctionDef)
    body = tree.body[1:] if ast.get_docstring(tree) else tree.body
    return body[0]


def called(statement: ast.stmt) -> str:
    """What a statement calls, when it is a call, or returns one, before which nothing else is computed."""
    value = statement.value if isinstance(statement, ast.Expr | ast.Return) else None
    if isinstance(value, ast.Call) and not any(isinstance(n, ast.Call) for a in value.args for n in ast.walk(a)):
        return ast.unparse(value.func)
    return ast.unparse(statement)


@pytest.mark.parametrize("kind", [*IN_PROCESS, *READ_ONLY], ids=lambda kind: kind.__name__)
def test_the_first_statement_of_a_method_that_needs_a_lease_checks_the_gate(kind: Any) -> None:
    """Or hands everything to another such method."""
    for name, _, _ in leased(kind):
        first = called(first_statement(vars(kind)[name]))
        assert first in CHECKS or first in {f"self.{other}" for other in LEASED}, f"{kind.__name__}.{name}: {first}"


@pytest.mark.parametrize(
    ("kind", "way"),
    [(TransformersEngine, "_need"), (VllmEngine, "_need"), (ServerEngine, "_need"), (FakeRankTrainer, "_check")],
    ids=["engine", "vllm", "servers", "fake"],
)
def test_what_a_method_checks_by_looks_at_the_gate_first(kind: Any, way: str) -> None:
    assert called(first_statement(vars(kind)[way])) in {"self._gate.check", "self.gate.check"}


# Read: who may release memory


RELEASERS = ("residency/", "trainers/fsdp/memory.py", "engines/transformers/live_weights.py", "engines/vllm/memory.py")
ELSEWHERE = {
    ("compat/cuda_driver.py", "torch.cuda.empty_cache"): "looks for room once more: what is in use stays",
}


def releases(path: Path) -> Iterator[str]:
    """Calls that take memory from tensors, or build what does."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Call):
            name = ast.unparse(node.func)
            last = name.rpartition(".")[2]
            if last in {"resize_", "empty_cache", "_cuda_clearCublasWorkspaces"} or last.endswith("Saver"):
                yield name


def test_memory_is_released_in_residency_and_in_the_memory_modules_of_backends_only() -> None:
    found = {
        (str(path.relative_to(SOURCE)), name)
        for path in sorted(SOURCE.rglob("*.py"))
        if not str(path.relative_to(SOURCE)).startswith(RELEASERS)
        for name in releases(path)
    }
    assert found == set(ELSEWHERE)
    assert any(True for path in SOURCE.rglob("residency/*.py") for _ in releases(path)), "it finds what it looks for"


def test_nothing_but_memory_modules_and_residency_imports_a_saver() -> None:
    importing = {
        str(path.relative_to(SOURCE))
        for path in SOURCE.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("tidemill.residency.savers")
    }
    assert importing, "it finds what it looks for"
    assert {path for path in importing if not path.startswith(RELEASERS)} == set()
