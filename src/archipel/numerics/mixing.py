"""One gossip round on flat tensors: the mixing, and the four places the outer momentum can act (GASLoC).

A worker starts the round at its anchor θ, reaches θ + g after its local steps, and offers a model z to its
partners; W mixes the offers. With y = θ + ηg:

    form      update                                  sent z               remembered
    mixed     θ' = W [y + γ(y − y_prev)]              y + γ(y − y_prev)    y
    local     θ' = W y + γ(y − y_prev)                y                    y
    postmix   u = W y;  θ' = u + γ(u − u_prev)        y                    u
    drift     v ← γv + g;  θ' = W [θ + η(g + γv)]     θ + η(g + γv)        v

The published text leaves open where the momentum acts. On the complete graph mixed, postmix and drift are
DiLoCo with torch's Nesterov momentum; mixed is the default, for its pairs end equal to the bit. Before the
first round y_prev = u_prev = θ and v = 0.

A round is `offer`, `mix`, `settle`. Mixing is in delta form, z_i + Σ w(ẑ_j − ẑ_i), where ẑ is what really
travelled: what a pair gains and loses sums to zero, so the mean over workers stays where it was under
compression, and under late application through `late`. A round without a partner is `settle(made,
made.sent)`.

Invariants: nothing passed in is changed; all tensors of a call have one shape and one floating type; terms
are added in the order given, so that equal arguments give equal bits.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from archipel.numerics.stability import Form

OWED_SHARE = 0.1  # of (1 − γ): see `late`
HALF = 0.5  # the weight of the one partner of an undamped pair


@dataclass(frozen=True)
class Offer:
    """A worker's side of a round, before it knows what the others bring. Vectors share one shape and type."""

    form: Form
    momentum: float
    sent: Tensor  # z
    remembered: Tensor  # for the next round, unless the form decides after mixing
    previous: Tensor  # what was remembered of the last round


@dataclass(frozen=True)
class ConsensusError:
    """How far workers are from their mean model."""

    mean_norm: float  # mean over workers of ‖θ_i − mean θ‖
    mean_square: float  # mean over workers of ‖θ_i − mean θ‖², which pairs of workers estimate
    relative: float  # mean_norm over ‖mean θ‖


def start(form: Form, theta: Tensor) -> Tensor:
    """Return what a worker remembers before its first round from θ."""
    return torch.zeros_like(theta) if form == "drift" else theta.clone()


def offer(
    form: Form, anchor: Tensor, reached: Tensor, remembered: Tensor, *, lr: float, momentum: float
) -> Offer:
    """Return what a worker brings. anchor: θ; reached: θ + g; remembered: from `start` or `settle`."""
    _check(anchor, reached, remembered)
    drift = reached - anchor
    if form == "drift":
        velocity = torch.add(drift, remembered, alpha=momentum)
        step = torch.add(drift, velocity, alpha=momentum)
        return Offer(form, momentum, torch.add(anchor, step, alpha=lr), velocity, remembered)
    y = torch.add(anchor, drift, alpha=lr, out=drift)
    if form != "mixed":
        return Offer(form, momentum, y, y, remembered)
    moved = y - remembered
    return Offer(form, momentum, torch.add(y, moved, alpha=momentum, out=moved), y, remembered)


def mix(
    own: Tensor, received: Sequence[Tensor], weights: Sequence[float], *, sent: Tensor | None = None
) -> Tensor:
    """Return z_i + Σ w_j (ẑ_j − ẑ_i), a worker's row of W in delta form.

    own: z_i. received: ẑ_j of each partner, as decoded. weights: of each in this worker's row, α and all.
    sent: ẑ_i, what the partners decoded of z_i; None: z_i itself. An undamped pair whose models travelled
    unchanged gets ½(z_i + z_j), which is the same to the bit at both ends.
    """
    assert len(received) == len(weights), (len(received), len(weights))
    _check(own, *received, *(() if sent is None else (sent,)))
    if sent is None and len(received) == 1 and weights[0] == HALF:
        return torch.add(own, received[0]).mul_(HALF)
    mixed = own.clone()
    for model, weight in zip(received, weights, strict=True):
        mixed.add_(change(model, weight, sent=own if sent is None else sent))
    return mixed


def change(received: Tensor, weight: float, *, sent: Tensor) -> Tensor:
    """Return w(ẑ_j − ẑ_i), what one exchange adds to worker i; it adds exactly the opposite to worker j."""
    return torch.sub(received, sent).mul_(weight)


def settle(made: Offer, mixed: Tensor) -> tuple[Tensor, Tensor]:
    """Return θ', where the next round starts, and what the worker remembers. mixed: `mix` of what was sent.

    Both may share memory with the arguments.
    """
    _check(made.sent, mixed)
    match made.form:
        case "local":
            return torch.add(mixed, made.sent - made.previous, alpha=made.momentum), made.remembered
        case "postmix":
            return torch.add(mixed, mixed - made.previous, alpha=made.momentum), mixed
        case "mixed" | "drift":
            return mixed, made.remembered


class Late(NamedTuple):
    """What to multiply a late `change` by: for the weights, for what is remembered, and for what is owed."""

    on_weights: float
    on_remembered: float
    owed: float  # added in the rounds to come, `owed_share` of what is left in each, to both


def late(form: Form, momentum: float, *, rounds: int = 0) -> Late:
    """Return how a worker adds a change that comes late; its partner added the opposite in time.

    rounds: how many were settled since the one the change belongs to. With 0 the one after it is under way:
    the state becomes what it would be had the change been in time, by the momentum's own recursion s_{k+1} =
    s_k + γ(s_k − s_{k−1}), s_0 = 1. Anchor and weights move together, so that the drift under way stays.

    A worker whose models are later than that in every round is a feedback with a delay, and the momentum on
    it drives it away from the others (by 1.24 a round on 2-peer rings with γ = 0.7). So 1/rounds of the
    change is added at once and moves no momentum, and the rest slowly, up to the 1/(1 − γ) that the partner's
    momentum makes of its own: the mean over workers arrives where it would be, a few rounds later.
    """
    assert rounds >= 0, rounds
    total = 1.0 if form == "drift" else 1.0 / (1.0 - momentum)
    if rounds > 0:
        return Late(1.0 / rounds, 0.0 if form == "drift" else 1.0 / rounds, total - 1.0 / rounds)
    match form:
        case "mixed" | "local":
            return Late(1.0, 0.0, 0.0)
        case "postmix":
            return Late(1.0 + momentum, 1.0, 0.0)
        case "drift":
            return Late(1.0, 0.0, 0.0)


def owed_share(form: Form, momentum: float) -> float:
    """Return which share of what is owed a round adds: so little that no delay makes it unstable."""
    return OWED_SHARE * (1.0 if form == "drift" else 1.0 - momentum)


def consensus_error(models: Sequence[Tensor]) -> ConsensusError:
    """Return how far the workers' models, flat and of one shape, are from their mean. Sums are float64."""
    _check(*models)
    mean = torch.zeros_like(models[0], dtype=torch.float64)
    for model in models:
        mean += model
    mean /= len(models)
    squares = [_square(model.double() - mean) for model in models]
    norm = math.fsum(math.sqrt(s) for s in squares) / len(squares)
    length = math.sqrt(_square(mean))
    relative = norm / length if length else (math.inf if norm else 0.0)
    return ConsensusError(norm, math.fsum(squares) / len(squares), relative)


def squared_distance(one: Tensor, other: Tensor) -> float:
    """Return ‖θ_i − θ_j‖² of two models, summed in float64: what an exchange tells for free."""
    _check(one, other)
    return _square(one.double() - other)


def mean_square_from_pairs(squared_distances: Sequence[float], n: int) -> float:
    """Return the estimate (n−1)/(2n) · mean ‖θ_i − θ_j‖² of mean ‖θ_i − mean θ‖², from random pairs of n.

    Unbiased when every pair is equally likely, as with the random graphs. Of what was sent, it is the error
    before mixing.
    """
    assert squared_distances and n >= 2, (len(squared_distances), n)
    return (n - 1) / (2 * n) * math.fsum(squared_distances) / len(squared_distances)


def _square(values: Tensor) -> float:
    """Return the squared norm of a float64 vector."""
    return float(torch.dot(values.flatten(), values.flatten()))


def _check(first: Tensor, *others: Tensor) -> None:
    """Assert one shape and one floating type."""
    assert first.is_floating_point(), first.dtype
    for other in others:
        assert other.shape == first.shape and other.dtype == first.dtype, (
            first.shape,
            other.shape,
            other.dtype,
        )
