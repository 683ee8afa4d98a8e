"""tidemill.weights.grouped_copies"""

import weakref

import pytest
import torch

from tidemill.weights import grouped_copies as module
from tidemill.weights.grouped_copies import GroupedCopies


def test_on_a_cpu_a_weight_is_copied_at_once() -> None:
    target, source = torch.zeros(3, dtype=torch.bfloat16), torch.randn(3)
    with GroupedCopies() as copies:
        copies.add(target, source)
        assert torch.equal(target, source.bfloat16())


def test_elsewhere_copies_wait_for_each_other_by_dtype_and_not_beyond_what_may_be_kept(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made: list[tuple[list[int], torch.dtype]] = []
    monkeypatch.setattr(
        torch, "_foreach_copy_", lambda targets, sources: made.append(([t.numel() for t in targets], sources[0].dtype))
    )
    monkeypatch.setattr(module, "_WAITING", 100)
    with GroupedCopies() as copies:
        for size, dtype in (
            (1, torch.float32),
            (2, torch.bfloat16),
            (3, torch.float32),
            (30, torch.float32),
            (4, None),
        ):
            source = torch.empty(size, device="meta", dtype=dtype)
            copies.add(torch.empty(size, device="meta"), source)
        assert made == [([1, 3, 30], torch.float32), ([2], torch.bfloat16)]
    assert made[2:] == [([4], torch.float32)]


def test_after_a_failure_nothing_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    copies = GroupedCopies()
    source = torch.empty(4, device="meta")
    kept = weakref.ref(source)
    with pytest.raises(OSError), copies:
        copies.add(torch.empty(4, device="meta"), source)
        raise OSError
    del source
    assert kept() is None


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_on_a_gpu_every_weight_arrives_whatever_its_dtype_strides_and_device(dtype: torch.dtype) -> None:
    sources = [torch.randn(n, 7, device="cuda") for n in (0, 1, 5, 1000)]
    sources += [torch.randn(7, 9, device="cuda").t(), torch.randn(4, 7, device="cuda").half(), torch.randn(3, 7)]
    targets = [torch.zeros(source.shape, dtype=dtype, device="cuda") for source in sources]
    targets.append(torch.zeros(7, 5, dtype=dtype, device="cuda").t())
    sources.append(torch.randn(5, 7, device="cuda"))
    with GroupedCopies() as copies:
        for target, source in zip(targets, sources, strict=True):
            copies.add(target, source)
    for target, source in zip(targets, sources, strict=True):
        assert torch.equal(target, source.to(device="cuda", dtype=dtype))
