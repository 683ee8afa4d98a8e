"""How requests are cut into what one replica answers at a time."""

from collections.abc import Sequence

from tidemill.contracts.engine import Request
from tidemill.errors import EngineError

__all__ = ["cut", "refuse_equal_keys"]


def cut(requests: Sequence[Request], *, replicas: int, max_batch: int) -> list[list[int]]:
    """Indices of requests in chunks, in the order in which free replicas take them: longest prompts first.

    A lone replica gets all at once, in order, and batches them as it would in the driver's process. Which requests meet
    in a chunk depends on them and on the number of replicas alone: who is free when must not change an answer.
    """
    if replicas == 1 or not requests:
        return [list(range(len(requests)))]
    order = sorted(range(len(requests)), key=lambda index: -len(requests[index].token_ids))
    size = min(max_batch, -(-len(requests) // replicas))
    return [order[start : start + size] for start in range(0, len(order), size)]


def refuse_equal_keys(requests: Sequence[Request]) -> None:
    """Raises EngineError for two requests of one key. A replica sees only its own share."""
    seen: set[str] = set()
    for request in requests:
        if request.key in seen:
            raise EngineError(f"cannot answer two requests with the one key {request.key}: their draws would be equal")
        seen.add(request.key)
