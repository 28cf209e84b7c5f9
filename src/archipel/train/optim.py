"""The inner optimizer: AdamW, its schedule over the run's ticks, and one inner step with accumulation.

Algorithm 1's inner step; the paper gives no values, so they are the user's (`OptimizerOptions`). The learning
rate is a pure function of the *global* tick, never of a learner's own step count: a learner that joins late
does not repeat the warm-up, and one that lags does not lag in its schedule.

Invariant: an inner step's gradient is that of the mean loss over all tokens of its micro-batches together,
however they are split and padded.
"""

import math
from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor, nn

from archipel.errors import DataError
from archipel.train.models import Batch, device_of, summed_loss, token_count
from archipel.train.options import OptimizerOptions, check

Schedule = Callable[[int], float]  # tick, 0-based → learning rate


def build(model: nn.Module, options: OptimizerOptions, steps: int) -> tuple[torch.optim.AdamW, Schedule]:
    """Return AdamW over the model's trainable parameters, and its learning rate by tick over `steps` ticks.

    Norms and biases (fewer than two dimensions) do not decay. Shared parameters count once.
    """
    check("optimizer", options)
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    groups = [
        {"params": [p for p in trainable if p.dim() >= 2], "weight_decay": options.weight_decay},
        {"params": [p for p in trainable if p.dim() < 2], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(
        [group for group in groups if group["params"]],
        lr=lr_at(0, options, steps),
        betas=options.betas,
        eps=options.eps,
        fused=True,  # on a CPU 5 times faster than the loop over tensors
    )
    return optimizer, partial(lr_at, options=options, total_steps=steps)


def lr_at(step: int, options: OptimizerOptions, total_steps: int) -> float:
    """Return the learning rate of the 0-based global tick `step`.

    It rises linearly to `lr` over the warm-up, whose last step has it in full, then follows half a cosine to
    `final_share · lr` at `total_steps` and stays there.
    """
    if step < options.warmup_steps:
        return options.lr * (step + 1) / options.warmup_steps
    if options.schedule == "constant":
        return options.lr
    share = min(1.0, (step - options.warmup_steps) / max(1, total_steps - options.warmup_steps))
    height = 0.5 * (1.0 + math.cos(math.pi * share))
    return options.lr * (options.final_share + (1.0 - options.final_share) * height)


def micro_batches(batch: Batch, count: int) -> list[Batch]:
    """Return the batch in `count` parts along its first dimension, as even as can be."""
    size = len(batch.inputs)
    if size < count:
        raise DataError(f"optimizer.accumulate={count} exceeds data.batch={size}: use at most {size}")
    inputs, targets = batch.inputs.tensor_split(count), batch.targets.tensor_split(count)
    return [Batch(*part) for part in zip(inputs, targets, strict=True)]


def inner_step(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    batch: Batch | Sequence[Batch],
    *,
    options: OptimizerOptions,
    lr: float,
) -> tuple[float, int]:
    """Take one inner step and return (mean loss per token, tokens). Gradients are left cleared.

    batch: split into `options.accumulate` micro-batches; a list of batches is taken as they are. Tokens are
    those that count in the loss, padding left out. A gradient that is not finite, or a batch without a token,
    leaves weights and moments as they were; the loss then says so (it is not finite, or 0 with 0 tokens).
    """
    parts = micro_batches(batch, options.accumulate) if isinstance(batch, Batch) else list(batch)
    tokens = sum(token_count(part) for part in parts)
    optimizer.zero_grad(set_to_none=True)
    if not tokens:
        return 0.0, 0
    mean = _accumulate(model, parts, tokens)
    norm = _clip(optimizer, options.clip)
    if norm.isfinite():
        for group in optimizer.param_groups:
            group["lr"] = lr
        optimizer.step()
    elif mean.isfinite():
        mean = norm
    optimizer.zero_grad(set_to_none=True)
    return float(mean), tokens


def _accumulate(model: nn.Module, parts: list[Batch], tokens: int) -> Tensor:
    """Add up gradients of sum(losses) / tokens and return that mean. One graph is held at a time."""
    device = device_of(model)
    mean = torch.zeros((), device=device)
    for part in parts:
        share = summed_loss(model, part.to(device)) / tokens
        share.backward()
        mean += share.detach()
    return mean


def _clip(optimizer: torch.optim.Optimizer, largest: float) -> Tensor:
    """Scale all gradients to a joint norm of at most `largest` (0: leave them) and return the norm before."""
    parameters = [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
    return nn.utils.clip_grad_norm_(parameters, largest or math.inf)
