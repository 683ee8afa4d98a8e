"""One prompt, one answer: nothing is said after it."""

from collections.abc import Sequence

from tidemill.contracts.engine import Completion, Generate, Request
from tidemill.contracts.sample import Prompt, Trajectory
from tidemill.errors import EnvironmentFailure

__all__ = ["SingleTurn"]


class SingleTurn:
    """Implements Environment. Ids and log-probs are the engine's own; every token of an answer is trained on.

    An answer that the engine could not finish stays in its group and says so by its stop reason.
    """

    def play(self, generate: Generate, prompts: Sequence[Prompt], samples: int) -> list[list[Trajectory]]:
        """`samples` unscored trajectories of each prompt, in order, from one call of `generate`.

        A request's key is the id of its trajectory. Raises EnvironmentFailure when answers and requests differ in
        number.
        """
        requests = [
            Request(key=f"{prompt.key}#{sample}", token_ids=prompt.token_ids)
            for prompt in prompts
            for sample in range(samples)
        ]
        completions = generate(requests)
        if len(completions) != len(requests):
            raise EnvironmentFailure(
                f"cannot match answers with prompts: the engine gave {len(completions)} for {len(requests)} requests; "
                "this is a fault of the engine, not of the data"
            )
        answers = iter(completions)
        return [[_trajectory(prompt, sample, next(answers)) for sample in range(samples)] for prompt in prompts]


def _trajectory(prompt: Prompt, sample: int, completion: Completion) -> Trajectory:
    return Trajectory(
        prompt=prompt,
        sample=sample,
        token_ids=completion.token_ids,
        logprobs=completion.logprobs,
        loss_mask=(True,) * len(completion.token_ids),
        version=completion.version,
        stop_reason=completion.stop_reason,
        text=completion.text,
    )
