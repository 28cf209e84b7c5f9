"""The built-in loop: one report per optimizer step, the learning rate of the run's tick."""

import pytest
import torch

from archipel.train import loop, models, optim
from archipel.train.models import Batch
from archipel.train.options import ModelOptions, OptimizerOptions

torch.set_num_threads(1)
TINY = ModelOptions(vocabulary=16, width=16, layers=1, heads=2, sequence=8)


class Stream:
    """Random batches; counts what is drawn."""

    def __init__(self) -> None:
        self.drawn = 0
        self._generator = torch.Generator().manual_seed(0)

    def next(self, batch: int) -> Batch:
        self.drawn += batch
        tokens = torch.randint(0, 16, (batch, 9), generator=self._generator)
        return Batch(tokens[:, :-1], tokens[:, 1:].clone())


class Learner:
    """Records what the loop tells it, and ends after some steps."""

    def __init__(self, steps: int, tick: int = 0) -> None:
        self.reports: list[int] = []
        self.tick = tick
        self._steps = steps

    @property
    def done(self) -> bool:
        return len(self.reports) >= self._steps

    def step(self, tokens: int) -> None:
        self.reports.append(tokens)


def train(steps: int, *, tick: int = 0, **changes):
    options = OptimizerOptions(warmup_steps=10, **changes)
    model, stream, learner = models.build(TINY, 0), Stream(), Learner(steps, tick)
    seen: list[tuple[int, float, int]] = []
    loop.run(
        model,
        stream,
        learner,
        options,
        batch=8,
        inner=optim.build(model, options, 100),
        watch=lambda *values: seen.append(values),
    )
    return model, stream, learner, seen


def test_accumulated_step_is_reported_once_with_the_tokens_of_all_its_parts():
    _, stream, learner, _ = train(5, accumulate=8)
    assert learner.reports == [64] * 5  # H = 5 is five of these: 40 micro-batches
    assert stream.drawn == 40


def test_accumulation_changes_neither_weights_nor_losses():
    whole, _, _, losses = train(3, eps=1.0)
    parts, _, _, losses_in_parts = train(3, accumulate=4, eps=1.0)
    for mine, theirs in zip(whole.parameters(), parts.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, atol=1e-6, rtol=1e-5)
    assert [tokens for _, _, tokens in losses] == [tokens for _, _, tokens in losses_in_parts]
    for (_, a, _), (_, b, _) in zip(losses, losses_in_parts, strict=True):
        assert a == pytest.approx(b, rel=1e-5)


def test_learning_rate_is_that_of_the_runs_tick():
    start = models.build(TINY, 0)
    early, _, _, _ = train(1, tick=0)
    late, _, _, _ = train(1, tick=9)

    def moved(model) -> float:
        pairs = zip(model.parameters(), start.parameters(), strict=True)
        return max((a - b).abs().max().item() for a, b in pairs)

    assert moved(late) == pytest.approx(10 * moved(early), rel=0.05)


def test_learner_that_is_done_takes_no_step():
    _, stream, learner, seen = train(0)
    assert (stream.drawn, learner.reports, seen) == (0, [], [])
