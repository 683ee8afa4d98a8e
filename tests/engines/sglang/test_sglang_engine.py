"""tidemill.engines.sglang.build, tidemill.engines.sglang.process and tidemill.engines.sglang.guardian.

The server is a program that stands in for SGLang's: tests.engines.stub_server. By its protocol alone the suites for
engines pass in tests.engines.remote, and over SGLang itself in test_sglang_on_a_gpu.
"""

import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import psutil
import pytest
from tests.engines import stub_server

from tidemill.contracts.engine import Sampling
from tidemill.contracts.events import Event, Metrics, Notice
from tidemill.contracts.footprint import Part
from tidemill.contracts.state import PolicyVersion
from tidemill.engines.remote.engine import ServerEngine
from tidemill.engines.remote.watching import NoProcess
from tidemill.engines.sglang.build import server_options, sglang_engine
from tidemill.engines.sglang.process import free_port
from tidemill.errors import EngineError, ResidencyError
from tidemill.testing.suites.engine_case import close_asleep, open_awake, requests_of
from tidemill.testing.tiny import make_tiny_model

STUB = (sys.executable, str(Path(stub_server.__file__)))
FIRST = PolicyVersion(1, 0)
REQUESTS = requests_of([[4 + row % 5] * (3 + row % 5) for row in range(24)])
SAMPLING = Sampling(max_new_tokens=6, seed=2)


class Made:
    def __init__(self, stack: ExitStack, tmp_path: Path) -> None:
        self.stack, self.log, self.events = stack, tmp_path / "sglang.log", list[Event]()

    def __call__(self, folder: Path, **settings: Any) -> ServerEngine:
        told: dict[str, Any] = {
            "model": folder,
            "dtype": "float32",
            "max_batch": 4,
            "emit": self.events.append,
            "command": STUB,
            "log": self.log,
            "device": "cpu",
            "health_every": 0.1,
            "start_deadline": 60.0,
            "recovery": 60.0,
        }
        engine = sglang_engine(**{**told, **settings})
        self.stack.callback(engine.close)
        return engine

    def ready(self, folder: Path, **settings: Any) -> ServerEngine:
        engine = self(folder, **settings)
        open_awake(engine)
        engine.load_pretrained(FIRST)
        return engine

    def said(self) -> str:
        return "\n".join(event.text for event in self.events if isinstance(event, Notice))


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Made]:
    with ExitStack() as stack:
        yield Made(stack, tmp_path)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return make_tiny_model(tmp_path / "model", hidden=64, heads=2, kv_heads=1)


def server_of(engine: ServerEngine) -> psutil.Process:
    guardian = psutil.Process(engine._replicas[0].process._guardian.pid)  # type: ignore[attr-defined]
    (server,) = guardian.children()
    return server


def gone(pids: list[int], within: float = 10.0) -> bool:
    ends = time.monotonic() + within
    while time.monotonic() < ends:
        if not any(psutil.pid_exists(pid) and psutil.Process(pid).status() != "zombie" for pid in pids):
            return True
        time.sleep(0.05)
    return False


def test_a_server_killed_while_it_answers_is_started_again_and_changes_no_answer(make: Made, folder: Path) -> None:
    expected = make.ready(folder).generate(REQUESTS, SAMPLING)
    engine = make.ready(folder, options=("--stub-faults", "kill@20"))
    before = server_of(engine).pid
    assert engine.generate(REQUESTS, SAMPLING) == expected
    assert server_of(engine).pid != before
    assert "is started again (1 of 3): it ended with code 137" in make.said()
    numbers = {
        name: value for event in make.events if isinstance(event, Metrics) for name, value in event.values.items()
    }
    assert numbers["engine/restarted"] == 1.0 and numbers["engine/reissued"] >= 1.0


def test_a_server_that_dies_too_often_ends_the_rollout_with_its_last_words(make: Made, folder: Path) -> None:
    engine = make.ready(folder, restarts=0, recovery=1.0)
    server_of(engine).kill()
    with pytest.raises(EngineError, match=r"no server .*engine.restarts = 0 times already; it ended with code 137"):
        engine.generate(REQUESTS, SAMPLING)


def test_a_server_killed_in_its_sleep_is_back_for_the_next_wake(make: Made, folder: Path) -> None:
    engine = make.ready(folder)
    expected = engine.generate(REQUESTS, SAMPLING)
    close_asleep(engine)
    server_of(engine).kill()
    open_awake(engine, Part.WEIGHTS)
    engine.load_pretrained(PolicyVersion(1, 1))
    open_awake(engine)
    answers = engine.generate(REQUESTS, SAMPLING)
    assert [answer.token_ids for answer in answers] == [answer.token_ids for answer in expected]
    # Between the weights' wake and the cache's: what it was given is gone with it.
    close_asleep(engine)
    open_awake(engine, Part.WEIGHTS)
    engine.load_pretrained(PolicyVersion(1, 2))
    server_of(engine).kill()
    gone([server_of(engine).pid] if engine._replicas[0].process.alive() else [])
    open_awake(engine)
    answers = engine.generate(REQUESTS, SAMPLING)
    assert [answer.token_ids for answer in answers] == [answer.token_ids for answer in expected]


def test_a_server_killed_before_a_sleep_holds_nothing_to_give_back(make: Made, folder: Path) -> None:
    engine = make.ready(folder)
    server_of(engine).kill()
    process = engine._replicas[0].process
    ends = time.monotonic() + 10
    while process.alive() and time.monotonic() < ends:
        time.sleep(0.05)
    close_asleep(engine)
    assert engine.resident() == Part.NONE


def test_a_server_that_cannot_start_says_why_with_the_end_of_its_log(make: Made, folder: Path) -> None:
    broken = (sys.executable, "-c", "import sys; print('no such kernel'); sys.exit(3)")
    with pytest.raises(EngineError, match=r"SGLang did not start: it ended with code 3; .*no such kernel"):
        make(folder, command=broken)
    with pytest.raises(EngineError, match=r"did not answer within .*engine.start_deadline"):
        make(folder, command=(sys.executable, "-c", "import time; time.sleep(60)"), start_deadline=1.0)


def test_a_port_that_somebody_takes_first_is_another_one_next(
    make: Made, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import socket

    with socket.create_server(("127.0.0.1", 0)) as taken:
        ports = [taken.getsockname()[1], free_port()]
        monkeypatch.setattr("tidemill.engines.sglang.process.free_port", lambda: ports.pop(0))
        engine = make(folder, health_every=5.0)
    assert engine._replicas[0].process.url.endswith(f":{engine._replicas[0].process.port}")  # type: ignore[attr-defined]
    assert not ports


def test_the_end_of_an_engine_is_the_end_of_its_server_and_all_below_it(make: Made, folder: Path) -> None:
    engine = make(folder)
    server = server_of(engine)
    staged = engine._staged.folder
    engine.close()
    assert gone([server.pid])
    assert not staged.exists()


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_the_end_of_a_run_in_whatever_manner_is_the_end_of_its_server(
    folder: Path, tmp_path: Path, number: signal.Signals
) -> None:
    program = f"""
    import sys, time
    from pathlib import Path
    from tidemill.contracts.events import ignore
    from tidemill.engines.sglang.build import sglang_engine
    engine = sglang_engine(model=Path({str(folder)!r}), dtype="float32", max_batch=4, emit=ignore, command={STUB!r},
                           device="cpu", log=Path({str(tmp_path / "log")!r}))
    print(engine._replicas[0].process._guardian.pid, engine._staged.folder, flush=True)
    time.sleep(60)
    """
    run = subprocess.Popen([sys.executable, "-c", textwrap.dedent(program)], stdout=subprocess.PIPE, text=True)
    assert run.stdout is not None
    guardian, staged = run.stdout.readline().split()
    below = [int(guardian), *(child.pid for child in psutil.Process(int(guardian)).children(recursive=True))]
    os.kill(run.pid, number)
    run.wait(10)
    assert gone(below)
    if number != signal.SIGINT:
        # Killed outright it leaves the folder to the next start.
        from tidemill.engines.remote.staged_weights import make_folder

        make_folder(None).rmdir()
    assert not Path(staged).exists()


def test_the_command_line_holds_what_the_settings_say_and_no_secret(folder: Path) -> None:
    words = server_options(
        model=folder, port=8123, dtype="bfloat16", memory=0.4, max_batch=7, reproducible=True, options=("--tp", "2")
    )
    assert words[-2:] == ["--tp", "2"]
    told = dict(zip(words[:-3:2], words[1:-3:2], strict=False))
    assert told["--port"] == "8123" and told["--mem-fraction-static"] == "0.4"
    assert {"--enable-memory-saver", "--enable-deterministic-inference"} <= {*words}


def test_a_wake_without_a_server_that_may_be_started_is_refused(make: Made, folder: Path) -> None:
    engine = make(folder, restarts=0)
    server_of(engine).kill()
    process = engine._replicas[0].process
    while process.alive():
        time.sleep(0.02)
    with pytest.raises(ResidencyError, match="cannot wake engine .*engine.restarts = 0"):
        engine.wake_up(Part.ALL)


def test_somebody_elses_server_is_nobodys_to_start() -> None:
    nobody: Callable[[], NoProcess] = NoProcess
    assert nobody().alive() and not nobody().restart() and not nobody().last_words()
