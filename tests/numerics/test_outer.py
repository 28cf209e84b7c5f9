"""The outer optimizers are torch's SGD as pure functions."""

import pytest
import torch

from archipel.numerics import outer
from archipel.numerics.codec import round_to_bf16

torch.set_num_threads(1)


@pytest.mark.parametrize(("mu", "nesterov"), [(0.9, True), (0.5, True), (0.9, False), (0.0, False)])
def test_fifty_steps_equal_torch_sgd(mu, nesterov):
    generator = torch.Generator().manual_seed(1)
    theta = torch.randn(257, generator=generator)
    reference = torch.nn.Parameter(theta.clone())
    optimizer = torch.optim.SGD([reference], lr=0.7, momentum=mu, nesterov=nesterov)
    momentum = outer.init(257)
    for _ in range(50):
        delta = torch.randn(257, generator=generator)
        reference.grad = delta.clone()
        optimizer.step()
        theta, momentum = outer.update(theta, momentum, delta, lr=0.7, mu=mu, nesterov=nesterov)
    torch.testing.assert_close(theta, reference.detach(), rtol=1e-6, atol=1e-6)


def test_first_nesterov_step_by_hand():
    theta, momentum = outer.nesterov(
        torch.tensor([1.0]), outer.init(1), torch.tensor([0.5]), lr=0.5, momentum_factor=0.5
    )
    assert (theta.item(), momentum.item()) == (1.0 - 0.5 * (0.5 + 0.5 * 0.5), 0.5)


def test_outer_lr_one_without_momentum_lands_on_the_learners_weights():
    old, new = torch.tensor([1.0, 2.0]), torch.tensor([0.5, 4.0])
    theta, _ = outer.sgd(old, outer.init(2), old - new, lr=1.0)
    assert torch.equal(theta, new)


def test_arguments_are_left_as_they_were():
    theta, momentum, delta = torch.ones(4), torch.full((4,), 2.0), torch.full((4,), 3.0)
    outer.update(theta, momentum, delta, lr=0.7, mu=0.9)
    assert torch.equal(theta, torch.ones(4)) and momentum.unique().item() == 2 and delta.unique().item() == 3


def test_result_goes_into_the_buffers_given():
    buffers = torch.empty(4), torch.empty(4)
    theta, momentum = outer.update(
        torch.ones(4), torch.ones(4), torch.ones(4), lr=0.7, mu=0.9, nesterov=True, out=buffers
    )
    assert theta is buffers[0] and momentum is buffers[1]
    fresh = outer.update(torch.ones(4), torch.ones(4), torch.ones(4), lr=0.7, mu=0.9)
    assert torch.equal(theta, fresh[0]) and torch.equal(momentum, fresh[1])


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_overflow_is_seen_before_it_is_committed(bad):
    values = torch.zeros(1000)
    assert outer.finite(values) and outer.finite(torch.empty(0))
    values[617] = bad
    assert not outer.finite(values)


def test_an_overflowing_step_is_not_finite():
    theta, _ = outer.update(torch.tensor([3e38]), outer.init(1), torch.tensor([-3e38]), lr=1.0, mu=0.0)
    assert not outer.finite(theta)


def test_empty_and_scalar_vectors_step():
    for numel in (0, 1):
        theta, momentum = outer.update(
            torch.zeros(numel), outer.init(numel), torch.ones(numel), lr=1.0, mu=0.9
        )
        assert theta.shape == momentum.shape == (numel,)


def test_steps_below_bf16_resolution_add_up_in_the_float32_state():
    theta, momentum = torch.ones(8), outer.init(8)
    delta = torch.full(
        (8,), 2.0**-12
    )  # bf16 near 1 resolves 2^-8: the learner's copy cannot show one such step
    for _ in range(64):
        theta, momentum = outer.sgd(theta, momentum, delta, lr=1.0)
    assert torch.equal(theta, torch.full((8,), 1.0 - 64 * 2.0**-12))
    assert round_to_bf16(theta.numpy()).max() < 1.0


def test_an_idle_bf16_learner_pushes_nothing_when_the_base_is_rounded():
    theta = torch.linspace(0.1, 3.0, 1001)
    held = theta.to(torch.bfloat16).to(torch.float32)  # what the learner wrote over its parameter
    base = torch.from_numpy(round_to_bf16(theta.numpy()))
    assert torch.equal(base - held, torch.zeros(1001))
    assert (theta - held).abs().max() > 1e-3  # without rounding, the grid would count as training
