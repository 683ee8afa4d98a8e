"""tidemill.cluster.ray.versions: hosts of one run have the same libraries."""

from pathlib import Path

import pytest
import torch

import tidemill
from tidemill.cluster.ray.versions import disagreement, hash_of_sources, versions

DRIVER = ("alpha", {"torch": "2.13.0", "python": "3.11", "tidemill": "0.1.0"})


def test_equal_versions_do_not_disagree() -> None:
    assert disagreement(DRIVER, [("beta", dict(DRIVER[1])), DRIVER]) == ""


def test_both_hosts_are_named_with_what_differs_and_nothing_else() -> None:
    other = {"torch": "2.11.0", "python": "3.11", "tidemill": "0.2.0"}
    text = disagreement(DRIVER, [("alpha", DRIVER[1]), ("beta", other), ("beta", other)])
    assert text == (
        "beta has torch 2.11.0, tidemill 0.2.0, and alpha, the driver's host, has torch 2.13.0, tidemill 0.1.0"
    )


def test_a_library_that_is_missing_is_a_difference() -> None:
    assert "beta has torch none" in disagreement(DRIVER, [("beta", {**DRIVER[1], "torch": "none"})])


def test_two_hosts_of_one_name_are_both_looked_at() -> None:
    assert disagreement(DRIVER, [("beta", {**DRIVER[1], "torch": "2.11.0"}), ("beta", dict(DRIVER[1]))])


def test_workers_whose_torch_was_built_otherwise_are_refused_and_both_are_named() -> None:
    built = {**DRIVER[1], "torch build": "2.13.0+cu128", "CUDA of torch": "12.8", "NCCL": "2.28.9"}
    others = {**built, "torch build": "2.13.0+cu126", "CUDA of torch": "12.6"}
    assert disagreement(DRIVER, [("beta", built), ("gamma", others), ("gamma", others)]) == (
        "gamma has torch build 2.13.0+cu126, CUDA of torch 12.6, "
        "and beta has torch build 2.13.0+cu128, CUDA of torch 12.8"
    )
    older = {**built, "NCCL": "2.27.3"}
    assert (
        disagreement(DRIVER, [("beta", built), ("gamma", older)]) == "gamma has NCCL 2.27.3, and beta has NCCL 2.28.9"
    )


def test_a_driver_on_a_host_without_gpus_may_have_another_build_of_the_same_torch() -> None:
    driver = ("alpha", {**DRIVER[1], "torch build": "2.13.0+cpu", "CUDA of torch": "none", "NCCL": "none"})
    built = {**DRIVER[1], "torch build": "2.13.0+cu128", "CUDA of torch": "12.8", "NCCL": "2.28.9"}
    assert disagreement(driver, [("beta", built), ("gamma", dict(built))]) == ""


def test_two_checkouts_of_one_version_differ_by_their_sources(tmp_path: Path) -> None:
    here, there = tmp_path / "here", tmp_path / "there"
    for folder in (here, there):
        (folder / "part").mkdir(parents=True)
        (folder / "part" / "one.py").write_text("x = 1\n")
        (folder / "part" / "notes.txt").write_text(folder.name)
    assert hash_of_sources(here) == hash_of_sources(there)
    (there / "part" / "one.py").write_text("x = 2\n")
    assert hash_of_sources(here) != hash_of_sources(there)
    driver = ("alpha", {"tidemill": "0.1.0", "sources of tidemill": "aa"})
    assert disagreement(driver, [("beta", {"tidemill": "0.1.0", "sources of tidemill": "bb"})]) == (
        "beta has sources of tidemill bb, and alpha, the driver's host, has sources of tidemill aa"
    )


def test_a_file_that_moved_or_is_there_beside_makes_other_sources(tmp_path: Path) -> None:
    found = set()
    for number, files in enumerate((["a.py"], ["b.py"], ["a.py", "b.py"])):
        folder = tmp_path / str(number)
        folder.mkdir()
        for name in files:
            (folder / name).write_text("x = 1\n")
        found.add(hash_of_sources(folder))
    assert len(found) == 3


def test_a_process_knows_its_versions(monkeypatch: pytest.MonkeyPatch) -> None:
    libraries = {"python", "tidemill", "torch", "transformers", "numpy"}
    assert libraries | {"sources of tidemill", "torch build", "CUDA of torch", "NCCL"} == set(versions())
    assert versions()["sources of tidemill"] == hash_of_sources(Path(tidemill.__file__).parent)
    assert "+" not in versions()["torch"]
    assert versions()["torch build"] == str(torch.__version__)
    assert versions()["CUDA of torch"] == str(torch.version.cuda or "none")
    assert (versions()["NCCL"] == "none") == (torch.version.cuda is None)
    monkeypatch.setenv("TIDEMILL_VERSIONS", "torch=9.9,python=4.0")
    assert (versions()["torch"], versions()["python"]) == ("9.9", "4.0")
