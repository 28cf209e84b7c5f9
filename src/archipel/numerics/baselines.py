"""What gossip training is compared with: DSGD, ATC, DAdam, Local-DAdam and NoLoCo, on flat tensors.

Each is what happens around `mixing.mix` with a doubly stochastic W; what is mixed and where the step is
taken tells them apart (gossip specification, section 6):

    method        mixed          after mixing
    dsgd          x              x' = W x − lr·∇F(x)
    atc           x − lr·∇F(x)   x' = W (x − lr·∇F(x))
    dadam         x              x' = W x − lr·m̂/(√v̂ + ε)
    local_dadam   x + g          x' = W (x + g)
    overlapped    x              x' = W x + g
    noloco        φ and Δ        m' = μm + L·mean(Δ) + L·(mean(φ) − φ_i);  φ' = φ + m'

In dsgd, dadam and overlapped the step comes from the unmixed x, so that mixing can go on beside the
computation. DiLoCo is `mixing` on the complete graph; GASLoC with H = 1, η = 1, γ = 0 is ATC.

Invariants: as in `mixing`: nothing passed in is changed, one shape and type in a call.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class AdamState:
    """Adam's moments of one worker, never mixed."""

    first: Tensor  # m
    second: Tensor  # v
    step: int = 0


@dataclass(frozen=True)
class NoLoCoState:
    """A worker's slow weights φ and their momentum."""

    slow: Tensor
    momentum: Tensor


def dsgd(mixed: Tensor, gradient: Tensor, *, lr: float) -> Tensor:
    """Return x' = W x − lr·∇F(x), the gradient taken at the unmixed x."""
    return torch.sub(mixed, gradient, alpha=lr)


def atc(theta: Tensor, gradient: Tensor, *, lr: float) -> Tensor:
    """Return x − lr·∇F(x), to be mixed into x': adapt, then combine."""
    return torch.sub(theta, gradient, alpha=lr)


def adam_start(theta: Tensor) -> AdamState:
    """Return the moments before the first step."""
    return AdamState(torch.zeros_like(theta), torch.zeros_like(theta))


def adam(
    state: AdamState, gradient: Tensor, *, betas: tuple[float, float] = (0.9, 0.999), eps: float = 1e-8
) -> tuple[Tensor, AdamState]:
    """Return m̂/(√v̂ + ε) and the moments after a gradient."""
    step = state.step + 1
    first = torch.lerp(state.first, gradient, 1 - betas[0])
    second = torch.mul(state.second, betas[1]).addcmul_(gradient, gradient, value=1 - betas[1])
    root = torch.div(second, 1 - betas[1] ** step).sqrt_().add_(eps)
    return torch.div(first, 1 - betas[0] ** step).div_(root), AdamState(first, second, step)


def dadam(mixed: Tensor, theta: Tensor, direction: Tensor, *, lr: float, weight_decay: float = 0.0) -> Tensor:
    """Return x' = W x − lr·(direction + decay·x).

    theta: the unmixed x. direction: from `adam`, with the gradient there. Weight decay is decoupled.
    """
    return torch.sub(mixed, direction, alpha=lr).sub_(theta, alpha=lr * weight_decay)


def local_dadam_sent(anchor: Tensor, reached: Tensor, *, overlapped: bool = False) -> Tensor:
    """Return what is mixed after H AdamW steps: where they led, or, overlapped, where they began."""
    return anchor if overlapped else reached


def local_dadam(mixed: Tensor, anchor: Tensor, reached: Tensor, *, overlapped: bool = False) -> Tensor:
    """Return x' = W(x + g), or x' = W x + g where mixing overlaps the steps. mixed: of what was sent."""
    return mixed + (reached - anchor) if overlapped else mixed


def noloco_start(theta: Tensor) -> NoLoCoState:
    """Return the slow weights θ and no momentum."""
    return NoLoCoState(theta.clone(), torch.zeros_like(theta))


def noloco(
    state: NoLoCoState,
    group: Sequence[tuple[Tensor, Tensor]],
    *,
    lr: float = 0.7,
    momentum: float = 0.5,
) -> NoLoCoState:
    """Return the state after a round; training goes on from its slow weights.

    group: (Δ, φ) of every member, this worker's own among them, in an order all share; Δ = θ − φ. Two vectors
    travel per partner. Momentum is heavy ball. A group of one is outer momentum alone.
    """
    assert group, "a group holds at least the worker itself"
    size = len(group)
    drift, slow = torch.zeros_like(state.slow), torch.zeros_like(state.slow)
    for member_drift, member_slow in group:
        drift.add_(member_drift, alpha=1 / size)
        slow.add_(member_slow, alpha=1 / size)
    pull = drift.add_(slow.sub_(state.slow))
    velocity = torch.mul(state.momentum, momentum).add_(pull, alpha=lr)
    return NoLoCoState(state.slow + velocity, velocity)
