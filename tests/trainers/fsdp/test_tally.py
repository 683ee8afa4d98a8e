"""tidemill.trainers.fsdp.tally"""

import pytest
import torch

from tidemill.contracts.algorithm import LossOutput
from tidemill.trainers.fsdp.ranks import Alone
from tidemill.trainers.fsdp.tally import Tally

ALONE = Alone().gather


def test_means_are_over_all_tokens_and_not_over_micro_batches() -> None:
    tally = Tally()
    for value, tokens in ((1.0, 1), (5.0, 3)):
        sums = {"policy/ratio": torch.tensor(value * tokens)}
        output = LossOutput(numerator=torch.tensor(value * tokens), count=tokens, sums=sums)
        tally.add_loss(output, torch.full((tokens,), -value))
    assert tally.metrics(ALONE) == {"policy/ratio": 4.0, "policy/nll": 4.0, "policy/loss": 4.0}


def test_nothing_trained_on_gives_no_numbers() -> None:
    assert Tally().metrics(ALONE) == {}


def test_what_is_fed_is_counted_with_its_padding() -> None:
    tally = Tally()
    tally.add_loss(LossOutput(numerator=torch.tensor(2.0), count=2.0, sums={}), torch.tensor([-1.0, -1.0]))
    tally.add_fed(places=6, tokens=4)
    tally.add_fed(places=2, tokens=2)
    metrics = tally.metrics(ALONE)
    assert (metrics["train/tokens"], metrics["train/padding_fraction"]) == (6.0, 0.25)


def test_ranks_are_added_up_before_anything_is_divided_and_every_rank_has_the_same_numbers() -> None:
    """Of three ranks, of which the last had no rows; a naive twin adds all tokens up in one place."""
    given = [[-1.0, -2.0], [-4.0], []]

    def filled(values: list[float]) -> Tally:
        logprobs = torch.tensor(values)
        sums = {"policy/ratio": torch.tensor(2.0 * len(values))}
        tally = Tally()
        tally.add_loss(LossOutput(numerator=-logprobs.sum(), count=float(len(values)), sums=sums), logprobs)
        tally.add_fed(places=len(values) + 1, tokens=len(values))
        return tally

    sent: list[torch.Tensor] = []

    def send(values: torch.Tensor) -> torch.Tensor:
        sent.append(values)
        return values[None]

    for values in given:
        filled(values).metrics(send)
    reports = [filled(values).metrics(lambda _: torch.stack(sent)) for values in given]
    whole = filled([value for values in given for value in values]).metrics(ALONE)
    whole["train/padding_fraction"] = 0.5
    assert reports[0] == reports[1] == reports[2] == pytest.approx(whole)
