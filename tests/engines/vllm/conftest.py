import importlib.util
import os
import subprocess
import sys
import time

import pytest

ALONE = "TIDEMILL_TEST_ALONE"


def pytest_collection_modifyitems(items) -> None:
    if importlib.util.find_spec("vllm") is not None:
        return
    for item in items:
        if item.get_closest_marker("vllm"):
            item.add_marker(pytest.mark.skip(reason="vLLM is not installed here: make test-vllm"))


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_protocol(item, nextitem) -> bool | None:
    """On a GPU vLLM's allocator serves one engine in the life of a process: each test has a process of its own."""
    if not item.get_closest_marker("vllm") or item.get_closest_marker("slow") or ALONE in os.environ or not _gpu():
        return None
    item.ihook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
    began = time.perf_counter()
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-rs", "-m", "vllm", item.nodeid]
    done = subprocess.run(
        command, env={**os.environ, ALONE: "1"}, capture_output=True, text=True, cwd=item.config.rootpath
    )
    outcome = "failed" if done.returncode else "skipped" if "SKIPPED [" in done.stdout else "passed"
    text = (done.stdout + done.stderr)[-20_000:]
    report = pytest.TestReport(
        nodeid=item.nodeid,
        location=item.location,
        keywords={},
        outcome=outcome,
        longrepr=text if outcome == "failed" else (item.location[0], 0, text) if outcome == "skipped" else None,
        when="call",
        duration=time.perf_counter() - began,
    )
    item.ihook.pytest_runtest_logreport(report=report)
    item.ihook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
    return True


def _gpu() -> bool:
    import torch

    return torch.cuda.is_available()
