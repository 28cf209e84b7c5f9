"""Validation: how well a model does on batches it was not trained on.

Used by the evaluator process on the *merged* model, and by the experiments. Nothing is changed: no gradient,
and every module's mode is put back.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import nn

from archipel.errors import DataError
from archipel.train.models import IGNORED, Batch, cross_entropy, device_of, logits, token_count


class Evaluation(NamedTuple):
    """Means over tokens; for images, over images."""

    loss: float  # nats
    accuracy: float  # share of targets whose score is the highest
    tokens: int


def evaluate(model: nn.Module, batches: Iterable[Batch]) -> Evaluation:
    """Return means over all tokens of the batches. Raises DataError if there is none."""
    loss, right, tokens = 0.0, 0, 0
    device = device_of(model)
    with evaluating(model):
        for batch in batches:
            scores, targets = logits(model, batch.inputs.to(device)), batch.targets.to(device)
            loss += float(cross_entropy(scores, targets))
            right += int(((scores.argmax(-1) == targets) & (targets != IGNORED)).sum())
            tokens += token_count(batch)
    if not tokens:
        raise DataError("there is nothing to evaluate on: raise evaluate.batches or data.valid_fraction")
    return Evaluation(loss / tokens, right / tokens, tokens)


def validation_loss(model: nn.Module, batches: Iterable[Batch]) -> float:
    """Return the mean loss (nats per token) over all tokens of the batches."""
    return evaluate(model, batches).loss


def accuracy(model: nn.Module, batches: Iterable[Batch]) -> float:
    """Return the share of images (of text: of tokens) whose target scores highest."""
    return evaluate(model, batches).accuracy


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """No gradients and evaluation mode inside; afterwards each module has the mode it had."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for module, training in modes:
            module.training = training
