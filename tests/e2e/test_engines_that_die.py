"""A run whose engine dies in the middle goes on, and ends with what it would have ended with: state, weights, numbers.

On Ray and on forked processes with two replicas, one of which is killed at each of its moments; and with an engine of
two servers at addresses, one of which dies and comes back.
"""

import json
import threading
import time
from pathlib import Path

import pytest

from tests.crash.small_run import Outcome, outcome, prepare, recipe, start
from tests.engines.stub_server import stubs

LIMIT = 200.0
SPAWNED = "tidemill.testing.spawned_cluster:SpawnedClusterSettings"


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("dying")
    prepare(folder)
    return folder


def ran(base: Path, name: str, words: list[str], armed: str = "") -> tuple[Outcome, list[str]]:
    """The outcome, and the warnings on the way."""
    run, log = base / name, base / f"{name}.log"
    process = start(["run", str(recipe(base, run)), *words], log, armed)
    process.join(LIMIT)
    assert process.exitcode == 0, log.read_text()[-3000:]
    events = [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]
    return outcome(run), [
        event["text"] for event in events if event["kind"] == "notice" and event["level"] == "warning"
    ]


@pytest.fixture(scope="module")
def expected(base: Path) -> Outcome:
    words = [f"cluster.use={SPAWNED}", "engine.replicas=2", "engine.max_batch=4"]
    return ran(base, "undisturbed", words)[0]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("cluster", "point"),
    [(SPAWNED, "worker.generate=kill@3"), (SPAWNED, "worker.generate=kill@8"), ("ray", "worker.generate=kill@5")],
)
def test_a_run_goes_on_without_a_replica_and_then_with_another(
    base: Path, expected: Outcome, cluster: str, point: str
) -> None:
    words = [f"cluster.use={cluster}", "cluster.restarts=1", "engine.replicas=2", "engine.max_batch=4"]
    name = f"{cluster[:5]} {point.replace('/', '-')}"
    found, warnings = ran(base, name, words, f"engine-1/{point}")
    assert any("engine-1 was started again (1 of 1)" in text for text in warnings), warnings
    assert found == expected


@pytest.mark.slow
def test_a_run_goes_on_without_a_server_and_then_with_it_again(base: Path) -> None:
    with stubs(base / "model", 2) as servers:
        urls = json.dumps([server.url for server in servers])
        words = ["engine.use=remote", f"engine.urls={urls}", "engine.health_every=0.2", "engine.probe_tolerance=0.001"]
        undisturbed, warnings = ran(base, "two servers", words)
        assert not warnings
        servers[1].arm("die", after=40, times=1)

        def return_soon() -> None:
            while servers[1].faults["die"].left:
                time.sleep(0.05)
            time.sleep(0.5)
            servers[1].rise()

        back = threading.Thread(target=return_soon, daemon=True)
        back.start()
        disturbed, warnings = ran(base, "two servers, one dies", words)
    assert any("is out" in text for text in warnings), warnings
    assert disturbed == undisturbed
