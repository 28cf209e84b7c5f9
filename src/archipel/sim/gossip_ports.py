"""What the gossip host asks of a peer's compute: the port, and one that stands for tensors with costs only.

A port answers during the call; `roles.gossiping` has one that holds tensors.
"""

from typing import Any, Protocol

from msgspec import Struct

from ..protocol import gossip as g
from ..protocol import messages as m

STATE_MODELS = 4  # vectors in a whole state: weights, what is remembered, and AdamW's two moments


class GossipPort(Protocol):
    """A peer's compute port: tensors (`roles.gossiping`), or costs that stand for them."""

    def prepare(self, settings: dict[str, Any], shard: int, position: int, saved: Any) -> m.Event:
        """Build the model, from what `save` returned once if it is not None; return `Prepared`."""
        ...

    def step(self, number: int, tick: int, rows: int | None = None) -> tuple[int, tuple[int, ...]]:
        """Take an inner step; return its tokens, and ()."""
        ...

    def act(self, action: m.Action, payload: Any) -> m.Event | None:
        """Carry out an action; return the event that answers it."""
        ...

    def payload(self, to: str, message: m.Message) -> Any:
        """Return what travels beside a message, with its `nbytes`; None: costs stand for it."""
        ...

    def save(self, number: int) -> Any:
        """Return a copy of the whole state at this round."""
        ...


class GossipCosts(Struct, frozen=True):
    """What everything but a peer's own steps and line costs."""

    seed: int = 0
    model_bytes: float = 1e6  # of one float32 model
    shards: int = 64

    def payload_bytes(self, message: m.AnyMessage, options: g.GossipOptions) -> float:
        """Return the bytes of a payload that costs stand for."""
        if isinstance(message, g.State):
            return STATE_MODELS * self.model_bytes
        halved = isinstance(message, g.Model) and options.codec == "bf16"
        return self.model_bytes / (2 if halved else 1)


class CostPeer:
    """Costs stand for tensors: every exchange succeeds, nothing is learned."""

    def __init__(self, tokens: int, schema: tuple[m.TensorSpec, ...]) -> None:
        self.tokens, self.schema = tokens, schema

    def prepare(self, settings: dict[str, Any], shard: int, position: int, saved: Any) -> m.Event:
        return m.Prepared(self.schema)

    def step(self, number: int, tick: int, rows: int | None = None) -> tuple[int, tuple[int, ...]]:
        return self.tokens if rows is None else rows, ()

    def act(self, action: m.Action, payload: Any) -> m.Event | None:
        match action:
            case g.Offer(round=number):
                return g.Offered(number)
            case g.Mix(round=number):
                return g.Mixed(number)
            case g.Correct(round=number, worker=worker):
                return g.Corrected(number, worker)
            case g.Capture(round=number, worker=worker):
                return g.Captured(number, worker)
            case g.Adopt(round=number):
                return g.Adopted(number)
            case g.Submit(attempt=attempt):
                return g.Submitted(attempt)
            case g.Gather(attempt=attempt, worker=worker):
                return g.Gathered(attempt, worker)
            case g.Average(attempt=attempt):
                return g.Averaged(attempt, "costs", {})
        return None

    def payload(self, to: str, message: m.Message) -> Any:
        return None

    def save(self, number: int) -> Any:
        return number
