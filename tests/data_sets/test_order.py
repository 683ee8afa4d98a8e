import hashlib

from tidemill.data.order import EpochOrder, shuffled

IDS = [f"row-{number}" for number in range(20)]


def test_the_order_is_pinned():
    """A changed algorithm would make every saved cursor point at other rows."""
    assert shuffled(IDS[:8], seed=0, epoch=0) == [6, 4, 5, 7, 3, 0, 2, 1]


def test_each_epoch_and_seed_has_its_own_permutation():
    orders = [tuple(shuffled(IDS, seed=seed, epoch=epoch)) for seed in range(2) for epoch in range(3)]
    assert len(set(orders)) == 6
    assert all(sorted(order) == list(range(20)) for order in orders)


def test_rows_keep_their_order_when_one_is_added():
    before = [IDS[index] for index in shuffled(IDS[:-1], seed=1, epoch=2)]
    after = [IDS[index] for index in shuffled(IDS, seed=1, epoch=2)]
    assert [id for id in after if id != IDS[-1]] == before


def test_the_digest_is_that_of_the_naive_chain():
    order = EpochOrder(IDS, [3, 1, 2])
    naive = ""
    for index in (3, 1, 2):
        naive = hashlib.blake2b(f"{naive}\0{IDS[index]}".encode(), digest_size=16).hexdigest()
    assert order.digest(3) == naive
    assert order.digest(0) == ""
    assert len({order.digest(position) for position in range(4)}) == 4
