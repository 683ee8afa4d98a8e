"""tidemill.cluster.ray.placing: what a run needs, whether a cluster has it, and who sits next to whom."""

import itertools
from collections import Counter

import pytest

from tidemill.cluster.ray.placing import Demand, Spot, by_host, seated, shortage


def demand(ranks: int, replicas: int, *, colocated: bool, cpus: float = 0.0, gpus: int = 1) -> Demand:
    return Demand(ranks=ranks, replicas=replicas, colocated=colocated, cpus=cpus, gpus=gpus)


def test_colocated_workers_share_a_bundle_and_half_its_gpu_each() -> None:
    run = demand(4, 2, colocated=True)
    assert [bundle["GPU"] for bundle in run.bundles] == [1, 1, 1, 1]
    assert run.worker["num_gpus"] == 0.5
    assert demand(1, 3, colocated=True).total("GPU") == 3


def test_separate_workers_have_gpus_of_their_own() -> None:
    run = demand(4, 2, colocated=False)
    assert run.total("GPU") == 6
    assert run.worker["num_gpus"] == 1


@pytest.mark.parametrize("colocated", [True, False])
def test_a_bundle_holds_what_its_workers_take(colocated: bool) -> None:
    for cpus in (0.0, 2.0):
        run = demand(3, 2, colocated=colocated, cpus=cpus, gpus=0)
        assert run.worker["num_gpus"] == 0
        assert run.total("CPU") == pytest.approx(5 * run.worker["num_cpus"])


def test_one_core_is_enough_for_many_ranks_that_set_none_aside() -> None:
    assert shortage(demand(64, 8, colocated=False, gpus=0), {"CPU": 1.0}) == ""


def test_a_cluster_too_small_is_told_with_both_numbers() -> None:
    there = {"CPU": 16.0, "GPU": 4.0}
    assert shortage(demand(4, 4, colocated=True), there) == ""
    text = shortage(demand(4, 2, colocated=False), there)
    assert (
        "has 4 GPUs, and 6 are needed for 4 trainer ranks and 2 engine replicas, each with a GPU of its own; lower"
        in text
    )
    assert 'cluster.placement = "colocated"' in text
    assert "has 16 CPUs, and 20 are needed" in shortage(demand(2, 2, colocated=True, cpus=5.0), there)
    assert "has 0 GPUs, and 1 are needed" in shortage(demand(1, 1, colocated=True), {"CPU": 1.0})


def test_who_is_placed_is_told_with_how_gpus_are_shared_where_there_are_any() -> None:
    assert demand(2, 1, colocated=True).words() == "2 trainer ranks and 1 engine replica, sharing GPUs"
    assert demand(2, 1, colocated=False, gpus=0).words() == "2 trainer ranks and 1 engine replica"
    assert demand(0, 2, colocated=True).words() == "2 engine replicas"
    assert demand(1, 0, colocated=False).words() == "1 trainer rank"


@pytest.mark.parametrize("colocated", [True, False])
def test_engines_without_a_trainer_have_a_bundle_each(colocated: bool) -> None:
    assert demand(0, 2, colocated=colocated).bundles == [{"GPU": 1.0}] * 2


def test_gpus_need_no_cpus_beside_them_unless_some_are_set_aside() -> None:
    assert demand(1, 1, colocated=True).bundles == [{"GPU": 1.0}]
    assert demand(1, 1, colocated=True, cpus=2.0).bundles == [{"GPU": 1.0, "CPU": 4.0}]


def test_ranks_are_numbered_host_by_host() -> None:
    nodes = ["b", "a", "b", "a", "c"]
    spots = [Spot(bundle=index, node=node, ip="") for index, node in enumerate(nodes)]
    assert [spot.bundle for spot in by_host(spots)] == [0, 2, 1, 3, 4]
    assert by_host([]) == []


def spots_on(nodes: str) -> list[Spot]:
    return [Spot(bundle=index, node=node, ip="") for index, node in enumerate(nodes)]


@pytest.mark.parametrize(("ranks", "replicas"), [(4, 2), (2, 4), (3, 3), (4, 0), (4, 1)])
@pytest.mark.parametrize("gpus", [0, 1])
@pytest.mark.parametrize("cpus", [0.0, 1.0])
def test_colocated_no_bundle_gets_more_workers_than_it_was_made_for(
    ranks: int, replicas: int, gpus: int, cpus: float
) -> None:
    run = demand(ranks, replicas, colocated=True, cpus=cpus, gpus=gpus)
    for nodes in itertools.product("ab", repeat=len(run.bundles)):
        trainer, engine = seated(run, spots_on("".join(nodes)))
        assert (len(trainer), len(engine)) == (ranks, replicas)
        # Replica i is where rank i is: they share a GPU.
        assert all(one is other for one, other in zip(trainer, engine, strict=False))
        for bundle, workers in Counter(spot.bundle for spot in [*trainer, *engine]).items():
            for resource, taken in (("CPU", run.worker["num_cpus"]), ("GPU", run.worker["num_gpus"])):
                assert workers * taken <= run.bundles[bundle].get(resource, 0.0) + 1e-9


def test_ranks_whose_bundles_are_alike_are_numbered_host_by_host_with_or_without_a_replica() -> None:
    trainer, engine = seated(demand(4, 2, colocated=True), spots_on("abab"))
    assert [spot.bundle for spot in trainer] == [0, 2, 1, 3]
    assert [spot.bundle for spot in engine] == [0, 2]


def test_separate_ranks_and_replicas_share_no_bundle() -> None:
    trainer, engine = seated(demand(3, 2, colocated=False, cpus=1.0), spots_on("babab"))
    assert [spot.bundle for spot in trainer] == [0, 2, 1]
    assert [spot.bundle for spot in engine] == [3, 4]
