"""What a gossip peer holds beside its model and optimizer: rounds at hand, and a state that can be kept."""

from dataclasses import dataclass, field

import msgspec
import numpy as np
from torch import Tensor

from ..numerics import mixing


@dataclass
class Round:
    """What is kept of a round until models can no longer come late."""

    sent: Tensor | None = None  # ẑ, what partners decode of our offer
    own: mixing.Offer | None = None  # until the round is settled
    payload: np.ndarray | None = None  # until then, too
    received: dict[str, Tensor] = field(default_factory=dict)  # partner -> ẑ_j


@dataclass
class Sum:
    """The writer's: an attempt's models added up, and how long each is."""

    total: Tensor  # (numel,) float64
    squares: dict[str, float] = field(default_factory=dict)
    refused: list[str] = field(default_factory=list)  # members whose models are none, or not finite


@dataclass
class Held:
    """All that a peer holds between two actions beside its model and its optimizer. Nothing is copied."""

    steps: int
    anchor: Tensor
    remembered: Tensor
    owed: Tensor | None
    lost: Tensor | None
    rounds: dict[int, Round]
    captured: dict[tuple[int, str], np.ndarray]
    final: np.ndarray | None
    sum: tuple[int, Sum] | None
    mean: Tensor | None


class Facts(msgspec.Struct, frozen=True):
    """What a captured state says of itself beside its tensors."""

    form: str
    round: int
    steps: int
    scalars: dict[str, float] = {}  # of the optimizer's state, what is no tensor
