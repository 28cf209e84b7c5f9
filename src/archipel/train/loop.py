"""The built-in training loop: what `archipel learner` runs, and what a user's own loop looks like.

One inner step after another until the run is done (Algorithm 1). The learning rate follows the run's global
tick, so that a learner that joins late is where the others are.
"""

from collections.abc import Callable
from typing import Protocol

import torch
from torch import nn

from .data import ImageStream, TokenStream
from .optim import Schedule, inner_step
from .options import OptimizerOptions

Watch = Callable[[int, float, int], None]  # step, loss, tokens


class Pace(Protocol):
    """What the loop needs of a learner."""

    @property
    def done(self) -> bool: ...

    @property
    def tick(self) -> int: ...

    def step(self, tokens: int) -> None: ...


def run(
    model: nn.Module,
    stream: TokenStream | ImageStream,
    learner: Pace,
    options: OptimizerOptions,
    *,
    batch: int,
    inner: tuple[torch.optim.Optimizer, Schedule],
    watch: Watch | None = None,
) -> None:
    """Train until the learner is done. batch: windows or images a step.

    inner: what `optim.build` returned for this model, before it joined: torch takes seconds to make its first
    optimizer, which would count as the first step's time.
    """
    optimizer, schedule = inner
    count = 0
    while not learner.done:
        loss, tokens = inner_step(
            model, optimizer, stream.next(batch), options=options, lr=schedule(learner.tick)
        )
        count += 1
        learner.step(tokens)
        if watch is not None:
            watch(count, loss, tokens)
