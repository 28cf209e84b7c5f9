"""The algorithms gossip training is compared with do what their formulas say."""

import pytest
import torch

from archipel.numerics import baselines, mixing

torch.set_num_threads(1)


def vectors(count, size=40):
    source = torch.Generator().manual_seed(5)
    return [torch.randn(size, generator=source, dtype=torch.float64) for _ in range(count)]


def test_dsgd_mixes_the_weights_before_the_step_and_atc_after():
    x, other, gradient, other_gradient = vectors(4)
    mixed = mixing.mix(x, [other], [0.5])
    torch.testing.assert_close(baselines.dsgd(mixed, gradient, lr=0.1), (x + other) / 2 - 0.1 * gradient)
    stepped = baselines.atc(x, gradient, lr=0.1), baselines.atc(other, other_gradient, lr=0.1)
    together = mixing.mix(stepped[0], [stepped[1]], [0.5])
    torch.testing.assert_close(together, (x + other) / 2 - 0.05 * (gradient + other_gradient))


def test_gossip_with_one_step_full_rate_and_no_momentum_is_atc():
    x, gradient, received = vectors(3)
    made = mixing.offer("mixed", x, x - 0.1 * gradient, mixing.start("mixed", x), lr=1.0, momentum=0.0)
    theta, _ = mixing.settle(made, mixing.mix(made.sent, [received], [0.5]))
    torch.testing.assert_close(theta, mixing.mix(baselines.atc(x, gradient, lr=0.1), [received], [0.5]))


@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
def test_a_lone_dadam_worker_is_torch_adamw(weight_decay):
    (x, *gradients) = vectors(30)
    reference = torch.nn.Parameter(x.clone())
    optimizer = torch.optim.AdamW([reference], lr=0.01, betas=(0.9, 0.98), weight_decay=weight_decay)
    state = baselines.adam_start(x)
    for gradient in gradients:
        reference.grad = gradient
        optimizer.step()
        direction, state = baselines.adam(state, gradient, betas=(0.9, 0.98))
        x = baselines.dadam(mixing.mix(x, [], []), x, direction, lr=0.01, weight_decay=weight_decay)
    torch.testing.assert_close(x, reference.detach(), rtol=1e-12, atol=1e-12)


def test_dadam_steps_from_the_unmixed_weights():
    x, other, direction = vectors(3)
    found = baselines.dadam(mixing.mix(x, [other], [0.5]), x, direction, lr=0.1, weight_decay=0.5)
    torch.testing.assert_close(found, (x + other) / 2 - 0.1 * (direction + 0.5 * x))


@pytest.mark.parametrize("overlapped", [False, True])
def test_local_dadam_mixes_after_or_beside_the_steps(overlapped):
    anchor, drift, other_anchor, other_drift = vectors(4)
    sent = baselines.local_dadam_sent(anchor, anchor + drift, overlapped=overlapped)
    received = baselines.local_dadam_sent(other_anchor, other_anchor + other_drift, overlapped=overlapped)
    found = baselines.local_dadam(
        mixing.mix(sent, [received], [0.5]), anchor, anchor + drift, overlapped=overlapped
    )
    own_share = drift if overlapped else (drift + other_drift) / 2
    torch.testing.assert_close(found, (anchor + other_anchor) / 2 + own_share)


def test_noloco_round_by_hand():
    # φ = 1, Δ = 2, m = 4; the partner has φ = 3, Δ = 6. mean Δ = 4, mean φ − φ = 1: m' = 2 + 0.7·4 + 0.7·1.
    one, two = torch.tensor([1.0]), torch.tensor([3.0])
    state = baselines.NoLoCoState(one, torch.tensor([4.0]))
    new = baselines.noloco(state, [(torch.tensor([2.0]), one), (torch.tensor([6.0]), two)])
    assert new.momentum.item() == pytest.approx(5.5)
    assert new.slow.item() == pytest.approx(6.5)


def test_noloco_pulls_a_pair_together_without_moving_its_mean():
    slow = vectors(2)
    group = [(torch.zeros(40, dtype=torch.float64), x) for x in slow]
    new = [baselines.noloco(baselines.noloco_start(x), group).slow for x in slow]
    torch.testing.assert_close(sum(new), sum(slow))
    torch.testing.assert_close(new[0] - new[1], 0.3 * (slow[0] - slow[1]))


def test_noloco_alone_is_heavy_ball():
    x, drift = vectors(2)
    state = baselines.noloco_start(x)
    for _ in range(3):
        state = baselines.noloco(state, [(drift, state.slow)], lr=0.7, momentum=0.5)
    # m = 0.7d, then 1.05d, then 1.225d
    torch.testing.assert_close(state.slow, x + (0.7 + 1.05 + 1.225) * drift)


def test_nothing_passed_in_is_changed():
    given = vectors(3)
    copies = [x.clone() for x in given]
    x, y, z = given
    baselines.dsgd(x, y, lr=0.1)
    baselines.dadam(x, y, z, lr=0.1, weight_decay=0.1)
    baselines.adam(baselines.AdamState(x, y.abs()), z)
    baselines.noloco(baselines.NoLoCoState(x, y), [(z, x), (y, z)])
    assert all(torch.equal(a, b) for a, b in zip(given, copies, strict=True))
