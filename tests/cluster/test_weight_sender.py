"""tidemill.cluster.weight_sender: whole weights into buckets, in lockstep whoever packs."""

import weakref
from collections.abc import Iterator

import pytest
import torch

from tidemill.cluster.weight_sender import Sent, WeightSender
from tidemill.errors import WeightSyncError
from tidemill.testing.suites.weight_sync import TensorTrainer
from tidemill.weights.checksum import checksum
from tidemill.weights.parcel import Parcel, host_bytes, unpack


def sent(sender: WeightSender, dtype: str, bucket_bytes: int) -> list[Parcel]:
    last = sender.open_shipment(dtype, bucket_bytes, "bytes")
    parcels = [sender.take_parcel()]
    while not last:
        last = sender.next_parcel()
        parcels.append(sender.take_parcel())
    return parcels


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("bucket_bytes", [1, 200, 300, 600, 1 << 20])
def test_every_weight_is_sent_once_cast_with_its_checksum(dtype: str, bucket_bytes: int) -> None:
    trainer = TensorTrainer()
    sender = WeightSender(trainer)
    arrived = [
        (name, weight.clone())
        for parcel in sent(sender, dtype, bucket_bytes)
        for name, weight in unpack(parcel.entries, host_bytes(parcel.payload))
    ]
    assert [name for name, _ in arrived] == list(trainer.weights)
    sums = sender.close_shipment().sums
    for name, weight in arrived:
        assert torch.equal(weight, trainer.weights[name].to(getattr(torch, dtype)))
        assert sums[name] == checksum(weight)


def test_a_parcel_keeps_to_the_bucket_unless_one_weight_alone_is_larger() -> None:
    trainer = TensorTrainer()
    for parcel in sent(WeightSender(trainer), "float32", 300):
        assert parcel.payload.nbytes <= 300 or len(parcel.entries) == 1
    assert len(sent(WeightSender(trainer), "float32", 1 << 20)) == 1
    assert len(sent(WeightSender(trainer), "float32", 1)) >= 4


def test_a_rank_that_feeds_nobody_pulls_in_step_with_one_that_does() -> None:
    for bucket_bytes in (1, 200, 300, 600, 1 << 20):
        trainers = [Counting(), Counting()]
        feeding, passing = (WeightSender(trainer) for trainer in trainers)
        last = [feeding.open_shipment("float32", bucket_bytes, "bytes")]
        last.append(passing.open_shipment("float32", bucket_bytes, "none"))
        while not all(last):
            assert last == [False, False]
            assert trainers[0].pulled == trainers[1].pulled
            last = [feeding.next_parcel(), passing.next_parcel()]
        assert last == [True, True]
        assert passing.close_shipment() == Sent()
        with pytest.raises(WeightSyncError, match="no shipment is open"):
            passing.take_parcel()


class Counting(TensorTrainer):
    """Counts what is pulled, and hands out one buffer again and again, as a gathering trainer may."""

    pulled = 0

    def named_weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        scratch = torch.empty(64)
        for name, weight in super().named_weights():
            self.pulled += 1
            yield name, scratch[: weight.numel()].view(weight.shape).copy_(weight)


def test_a_source_may_write_each_weight_where_the_one_before_lay() -> None:
    trainer = Counting()
    (parcel,) = sent(WeightSender(trainer), "float32", 1 << 20)
    for name, weight in unpack(parcel.entries, host_bytes(parcel.payload)):
        assert torch.equal(weight, trainer.weights[name])


def test_a_rank_opened_to_feed_nobody_has_no_parcel() -> None:
    sender = WeightSender(TensorTrainer())
    sender.open_shipment("float32", 1, "none")
    with pytest.raises(WeightSyncError, match="feed nobody"):
        sender.take_parcel()


def test_opening_ends_what_a_failure_left_open_and_closing_may_be_repeated() -> None:
    trainer = TensorTrainer()
    trainer.fail_at = 2
    sender = WeightSender(trainer)
    with pytest.raises(OSError, match="link went down"):
        sent(sender, "float32", 1)
    trainer.fail_at = -1
    assert len(sent(sender, "float32", 1 << 20)) == 1
    assert set(sender.close_shipment().sums) == set(trainer.weights)
    assert sender.close_shipment() == Sent()
    for call in (sender.next_parcel, sender.take_parcel):
        with pytest.raises(WeightSyncError, match="no shipment is open"):
            call()


def test_a_weight_handed_out_twice_or_larger_than_told_is_refused() -> None:
    class Twice(TensorTrainer):
        def named_weights(self) -> Iterator[tuple[str, torch.Tensor]]:
            yield from super().named_weights()
            yield from super().named_weights()

    class Larger(TensorTrainer):
        def named_weights(self) -> Iterator[tuple[str, torch.Tensor]]:
            yield "embed", torch.zeros(4000)

    with pytest.raises(WeightSyncError, match="two weights named 'embed'"):
        sent(WeightSender(Twice()), "float32", 1)
    with pytest.raises(WeightSyncError, match="'embed' as \\(4000,\\)"):
        sent(WeightSender(Larger()), "float32", 1)


def test_a_dtype_unknown_is_refused_before_anything_is_pulled() -> None:
    trainer = Counting()
    with pytest.raises(WeightSyncError, match="int4"):
        WeightSender(trainer).open_shipment("int4", 1, "bytes")
    assert trainer.pulled == 0


def test_a_sender_keeps_no_parcel_that_was_taken_so_that_no_more_than_two_buckets_are_in_memory() -> None:
    trainer = TensorTrainer()
    sender = WeightSender(trainer)
    last = sender.open_shipment("float32", 1, "bytes")
    on_their_way: list[weakref.ref] = []
    for _ in range(3):
        parcel = sender.take_parcel()
        on_their_way.append(weakref.ref(parcel.payload.base))
        assert [way() is None for way in on_their_way] == [True] * (len(on_their_way) - 1) + [False]
        assert not last
        last = sender.next_parcel()  # while `parcel` is being loaded
        del parcel
    sender.close_shipment()
    assert all(way() is None for way in on_their_way)
