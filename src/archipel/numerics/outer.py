"""Outer optimizers as pure functions: (Θ, momentum, Δ) -> (Θ', momentum'). Decoupled DiLoCo, section 3.2.

b ← μb + Δ, then Θ ← Θ − lr·(Δ + μb) with Nesterov momentum (torch's form), Θ ← Θ − lr·b without; μ = 0 is
plain SGD. An outer gradient is old minus new, so the step goes against it.

Invariants: float32; nothing passed in is changed, so that a caller checks the result (`finite`) before it
commits.
"""

import math

import torch
from torch import Tensor


def init(numel: int) -> Tensor:
    """Return the momentum (numel,) before the first step: zeros."""
    return torch.zeros(numel, dtype=torch.float32)


def update(
    theta: Tensor,
    momentum: Tensor,
    delta: Tensor,
    *,
    lr: float,
    mu: float,
    nesterov: bool = True,
    out: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """Return the weights and momentum after one outer step, in `out` if given.

    All tensors have one shape and are float32. The tensors of `out` share no memory with the arguments or
    each other. Equals a step of torch.optim.SGD(lr, momentum=mu, nesterov=nesterov) whose gradient is delta.
    """
    assert theta.shape == momentum.shape == delta.shape, (theta.shape, momentum.shape, delta.shape)
    assert theta.dtype == momentum.dtype == delta.dtype == torch.float32
    theta_new, momentum_new = out or (torch.empty_like(theta), torch.empty_like(momentum))
    assert theta_new.shape == momentum_new.shape == theta.shape
    # In torch's order: one fused add would round differently, and momentum carries that on.
    torch.mul(momentum, mu, out=momentum_new).add_(delta)
    if not nesterov:
        torch.sub(theta, momentum_new, alpha=lr, out=theta_new)
        return theta_new, momentum_new
    torch.add(delta, momentum_new, alpha=mu, out=theta_new)
    torch.sub(theta, theta_new, alpha=lr, out=theta_new)
    return theta_new, momentum_new


def nesterov(
    theta: Tensor, momentum: Tensor, delta: Tensor, *, lr: float, momentum_factor: float
) -> tuple[Tensor, Tensor]:
    """Return weights and momentum after a step of SGD with Nesterov momentum, the papers' outer optimizer."""
    return update(theta, momentum, delta, lr=lr, mu=momentum_factor, nesterov=True)


def sgd(theta: Tensor, momentum: Tensor, delta: Tensor, *, lr: float) -> tuple[Tensor, Tensor]:
    """Return the weights after a plain step, and the momentum, which holds the outer gradient unused."""
    return update(theta, momentum, delta, lr=lr, mu=0.0, nesterov=False)


def finite(values: Tensor) -> bool:
    """Return whether no value is NaN or infinite, without a temporary."""
    if values.numel() == 0:
        return True
    low, high = torch.aminmax(values)  # both become NaN if any value is
    return math.isfinite(low.item()) and math.isfinite(high.item())
