"""The experts of a layer: one tensor for all of them in memory, since transformers 5; elsewhere three an expert."""

from collections.abc import Sequence
from dataclasses import dataclass

from tidemill.errors import DataError
from tidemill.names.naming import Cut, Shape, whole

__all__ = ["JoinedExperts"]

_GATE_UP, _DOWN = "experts.gate_up_proj", "experts.down_proj"


@dataclass(frozen=True, kw_only=True)
class JoinedExperts:
    """`E` experts of width `I`, states of width `H`: gate and up lie in `[E, 2I, H]`, gate first, down in `[E, H, I]`.

    `here` and `there` are what the layer's mixture is called in memory and in Hugging Face names; `gate`, `up` and
    `down` are what an expert's matrices are called there.
    """

    here: str
    there: str
    gate: str
    up: str
    down: str

    def cuts(self, name: str, shape: Shape) -> Sequence[Cut]:
        """Of the trainer's tensor `name`; none when it is in no mixture of experts.

        Raises DataError for experts of a shape that is not theirs.
        """
        before, found, inside = name.partition(self.here)
        if not found or not inside.startswith(("experts.", "gate.")):
            return ()
        if inside not in (_GATE_UP, _DOWN):
            return (whole(name, shape, called=f"{before}{self.there}{inside}"),)
        if len(shape) != 3 or (inside == _GATE_UP and shape[1] % 2):
            raise DataError(
                f"cannot name the weights of this model: {name} has shape {list(shape)}, and the experts of a layer "
                "lie in three dimensions, gate and up one behind the other"
            )
        matrices = (self.gate, self.up) if inside == _GATE_UP else (self.down,)
        experts, rows, columns = shape[0], shape[1] // len(matrices), shape[2]
        return [
            Cut(
                name=f"{before}{self.there}experts.{expert}.{matrix}.weight",
                tensor=name,
                start=(expert, number * rows, 0),
                box=(1, rows, columns),
                shape=(rows, columns),
            )
            for expert in range(experts)
            for number, matrix in enumerate(matrices)
        ]
