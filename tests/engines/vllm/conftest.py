import importlib.util

import pytest


def pytest_collection_modifyitems(items) -> None:
    if importlib.util.find_spec("vllm") is not None:
        return
    for item in items:
        if item.get_closest_marker("vllm"):
            item.add_marker(pytest.mark.skip(reason="vLLM is not installed here: make test-vllm"))
