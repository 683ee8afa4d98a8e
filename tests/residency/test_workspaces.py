from collections.abc import Callable

import pytest
import torch

from tidemill.residency.workspaces import free_workspaces, hold_workspaces


@pytest.fixture
def freed(monkeypatch: pytest.MonkeyPatch) -> Callable[[], int]:
    """How often cuBLAS's workspaces were freed."""
    times: list[None] = []
    monkeypatch.setattr(torch._C, "_cuda_clearCublasWorkspaces", lambda: times.append(None), raising=False)
    return lambda: len(times)


def test_workspaces_are_not_freed_while_captured_graphs_may_be_replayed(freed: Callable[[], int]) -> None:
    free_workspaces()
    assert freed() == 1
    first, second = hold_workspaces(), hold_workspaces()
    free_workspaces()
    first()
    first()
    free_workspaces()
    assert freed() == 1
    second()
    free_workspaces()
    assert freed() == 2


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_a_captured_matrix_product_is_right_after_everything_that_can_be_given_back_was() -> None:
    from tidemill.residency.transfer import CudaTransfer

    let_go = hold_workspaces()
    try:
        # Few rows and many columns: such products are cut along the inner dimension, and summed in a workspace.
        left, right = (torch.randn(shape, device="cuda", dtype=torch.bfloat16) for shape in ((128, 8192), (8192, 1024)))
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            expected = left @ right
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, stream=stream):
                found = left @ right
        CudaTransfer(torch.device("cuda")).give_back()
        taken = torch.full((1 << 28,), 7, dtype=torch.uint8, device="cuda")
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(found, expected)
        assert bool((taken == 7).all()), "the graph wrote into memory that was given back"
    finally:
        let_go()
