import pytest

from tidemill.recorders.page.curves import curves, rounded, thin
from tidemill.recorders.page.source import Numbers


def numbers(count: int) -> Numbers:
    losses = [3.0 if step < 4 else 0.1 for step in range(count)]
    lines = [{"kind": "metrics", "step": i, "policy/loss": loss, "odd/one": i / 2} for i, loss in enumerate(losses)]
    evaluation = {"step": 4, "eval/exact_match": 0.5, "eval/tokens_mean": 7.0, "eval/pass_at_4": 0.75}
    return Numbers(metrics=lines, timings=[], evaluations=[evaluation], steps=count)


def test_thinning_keeps_few_points_whole_and_means_of_many() -> None:
    assert thin([(1, 2.0), (2, 3.0)], 10) == ([1, 2], [2.0, 3.0])
    pairs = [(i, float(i)) for i in range(1000)]
    x, y = thin(pairs, 100)
    assert len(x) == 100 and x[-1] == 999
    assert y == [pytest.approx(sum(range(k, k + 10)) / 10) for k in range(0, 1000, 10)]
    assert thin([], 10) == ([], [])


def test_the_two_phases_have_a_loss_each_and_what_is_not_known_is_still_drawn() -> None:
    charts = {chart["key"]: chart for chart in curves(numbers(8), 4)}
    assert charts["warm-up"]["series"][0]["x"] == [1, 2, 3, 4]
    assert charts["loss"]["series"][0]["x"] == [5, 6, 7, 8]
    assert charts["odd/one"]["more"] and charts["eval/tokens_mean"]["more"] and not charts["eval/pass_at_4"]["more"]
    assert charts["reward"]["series"][0]["name"] == "evaluation, exact match"


def test_a_run_still_warming_up_shows_its_loss() -> None:
    charts = {chart["key"]: chart for chart in curves(numbers(3), 4)}
    assert charts["loss"]["series"][0]["x"] == [1, 2, 3]
    assert "warm-up" not in charts


def test_a_gap_stays_a_gap() -> None:
    holes = Numbers(
        metrics=[{"step": 0, "policy/loss": None}, {"step": 1, "policy/loss": 2.0}], timings=[], evaluations=[], steps=2
    )
    assert curves(holes, 0)[0]["series"][0]["x"] == [2]


def test_five_digits_are_kept() -> None:
    assert rounded(0.123456789) == 0.12346
    assert rounded(1234567.0) == 1234600.0


@pytest.mark.parametrize(("kl", "drawn"), [(0.0, False), (0.01, True)])
def test_a_divergence_that_is_always_zero_has_no_chart(kl: float, drawn: bool) -> None:
    lines = [{"kind": "metrics", "step": step, "policy/kl": kl} for step in range(5)]
    charts = curves(Numbers(metrics=lines, timings=[], evaluations=[], steps=5), 0)
    assert any("KL" in str(chart) for chart in charts) is drawn
