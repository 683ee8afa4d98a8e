import pytest

from tidemill.contracts.sample import Prompt
from tidemill.contracts.state import Cursor
from tidemill.data.prompt_source import PromptsPerStep


class Numbers:
    def __len__(self):
        return 3

    def take(self, cursor, count):
        prompts = [Prompt(id=str(n), key=f"0:{n}", token_ids=(n,), text="") for n in range(count)]
        return prompts, Cursor(position=cursor.position + count)


def test_a_step_takes_its_number_of_prompts():
    prompts, cursor = PromptsPerStep(Numbers(), 2).take(Cursor(position=1))
    assert len(prompts) == 2
    assert cursor.position == 3


def test_a_step_without_prompts_is_refused():
    with pytest.raises(ValueError, match="at least one"):
        PromptsPerStep(Numbers(), 0)
