"""tidemill.cluster.ray.versions: hosts of one run have the same libraries."""

import pytest

from tidemill.cluster.ray.versions import disagreement, versions

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


def test_a_process_knows_its_versions(monkeypatch: pytest.MonkeyPatch) -> None:
    assert {"python", "tidemill", "torch", "transformers", "numpy"} == set(versions())
    assert "+" not in versions()["torch"]
    monkeypatch.setenv("TIDEMILL_VERSIONS", "torch=9.9,python=4.0")
    assert (versions()["torch"], versions()["python"]) == ("9.9", "4.0")
