"""The inner optimizer: schedule by the global tick, gradients by token however the batch is split."""

import math

import pytest
import torch

from archipel.errors import ConfigError, DataError
from archipel.train import models, optim
from archipel.train.models import IGNORED, Batch
from archipel.train.options import ModelOptions, OptimizerOptions

torch.set_num_threads(1)

TINY = ModelOptions(vocabulary=50, width=32, layers=1, heads=4)


def text_batch(windows=8, sequence=12, seed=0):
    tokens = torch.randint(0, 50, (windows, sequence + 1), generator=torch.Generator().manual_seed(seed))
    return Batch(tokens[:, :-1], tokens[:, 1:].clone())


def unevenly_padded(batch):
    """From 10 % to 100 % of the targets of a window count."""
    for window, kept in enumerate((1, 12, 3, 12, 6, 2, 9, 12)):
        batch.targets[window, kept:] = IGNORED
    return batch


def after_one_step(batch, **changes):
    options = OptimizerOptions(
        **{"eps": 1.0, "warmup_steps": 0, **changes}
    )  # a large eps: no sign-like steps
    model = models.build(TINY, 0)
    optimizer, schedule = optim.build(model, options, 10)
    result = optim.inner_step(model, optimizer, batch, options=options, lr=schedule(0))
    return result, model.state_dict()


def test_warmup_then_cosine_to_its_floor():
    options = OptimizerOptions(lr=1.0, warmup_steps=4, final_share=0.1)
    rates = [optim.lr_at(step, options, 104) for step in (0, 1, 3, 4, 54, 104, 500)]
    assert rates == pytest.approx([0.25, 0.5, 1.0, 1.0, 0.55, 0.1, 0.1])


def test_constant_schedule_stays_after_the_warmup():
    options = OptimizerOptions(lr=2.0, warmup_steps=2, schedule="constant")
    assert [optim.lr_at(step, options, 10) for step in (0, 1, 2, 9, 99)] == [1.0, 2.0, 2.0, 2.0, 2.0]


@pytest.mark.parametrize("steps", [0, 1, 5])
def test_run_shorter_than_its_warmup_has_a_finite_rate(steps):
    options = OptimizerOptions(lr=1.0, warmup_steps=5)
    assert all(0 < optim.lr_at(step, options, steps) <= 1.0 for step in range(8))


def test_late_joiner_gets_the_rate_of_the_tick_not_of_its_first_step():
    options = OptimizerOptions(lr=1.0, warmup_steps=10, schedule="constant")
    model = models.build(TINY, 0)
    optimizer, schedule = optim.build(model, options, 100)
    optim.inner_step(model, optimizer, text_batch(), options=options, lr=schedule(50))
    assert {group["lr"] for group in optimizer.param_groups} == {1.0}


def test_only_matrices_decay_and_tied_weights_are_listed_once():
    model = models.build(TINY, 0)
    optimizer, _ = optim.build(model, OptimizerOptions(weight_decay=0.3), 10)
    decayed, plain = optimizer.param_groups
    assert (decayed["weight_decay"], plain["weight_decay"]) == (0.3, 0.0)
    assert {p.dim() for p in decayed["params"]} == {2}
    assert {p.dim() for p in plain["params"]} == {1}
    listed = [p.numel() for group in optimizer.param_groups for p in group["params"]]
    assert sum(listed) == models.parameter_count(model)


def test_frozen_parameters_are_left_out():
    model = models.build(TINY, 0)
    model.model.norm.weight.requires_grad_(False)
    optimizer, _ = optim.build(model, OptimizerOptions(), 10)
    assert not any(p is model.model.norm.weight for group in optimizer.param_groups for p in group["params"])


@pytest.mark.parametrize("parts", [2, 3, 8])
def test_accumulated_unevenly_padded_parts_are_one_batch(parts):
    (loss, tokens), weights = after_one_step(unevenly_padded(text_batch()))
    (parted_loss, parted_tokens), parted = after_one_step(unevenly_padded(text_batch()), accumulate=parts)
    assert tokens == parted_tokens == 57
    assert parted_loss == pytest.approx(loss, rel=1e-6)
    for name, weight in weights.items():
        torch.testing.assert_close(parted[name], weight, atol=1e-7, rtol=1e-5)


def test_list_of_batches_of_any_shape_is_one_step():
    """Windows of 12 and of 5 tokens: each token weighs the same."""
    long, short = text_batch(2, 12), text_batch(3, 5, seed=1)
    (loss, tokens), _ = after_one_step([long, short])
    model = models.build(TINY, 0)
    total = float((models.summed_loss(model, long) + models.summed_loss(model, short)).detach())
    assert (loss, tokens) == (pytest.approx(total / 39, rel=1e-6), 39)


def test_step_lowers_the_loss_of_its_batch():
    (before, _), weights = after_one_step(text_batch(), eps=1e-8, lr=1e-3)
    model = models.build(TINY, 1)
    model.load_state_dict(weights)
    assert float(models.loss(model, text_batch()).detach()) < before


def test_clipping_bounds_the_joint_norm():
    model = models.build(TINY, 0)
    optimizer, _ = optim.build(model, OptimizerOptions(), 10)
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, 3.0)
    optim._clip(optimizer, 0.5)
    norm = math.sqrt(sum(float(p.grad.square().sum()) for p in model.parameters()))
    assert norm == pytest.approx(0.5, rel=1e-3)


def test_no_clipping_leaves_gradients_alone():
    model = models.build(TINY, 0)
    optimizer, _ = optim.build(model, OptimizerOptions(), 10)
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, 3.0)
    optim._clip(optimizer, 0.0)
    assert all(bool((p.grad == 3.0).all()) for p in model.parameters())


def test_gradient_that_is_not_finite_changes_nothing():
    options = OptimizerOptions()
    model = models.build(TINY, 0)
    optimizer, _ = optim.build(model, options, 10)
    optim.inner_step(model, optimizer, text_batch(), options=options, lr=0.01)
    moments = {id(p): s["exp_avg"].clone() for p, s in optimizer.state.items()}
    with torch.no_grad():
        model.model.norm.weight[0] = math.inf
    weights = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    loss, tokens = optim.inner_step(model, optimizer, text_batch(), options=options, lr=0.01)
    assert not math.isfinite(loss) and tokens == 96
    assert all(torch.equal(tensor, weights[name]) for name, tensor in model.state_dict().items())
    assert all(torch.equal(s["exp_avg"], moments[id(p)]) for p, s in optimizer.state.items())


def test_batch_of_padding_alone_is_no_step():
    batch = text_batch()
    batch.targets[:] = IGNORED
    (loss, tokens), weights = after_one_step(batch)
    assert (loss, tokens) == (0.0, 0)
    start = models.build(TINY, 0).state_dict()
    assert all(torch.equal(weights[name], start[name]) for name in start)


def test_step_is_bitwise_repeatable():
    one, two = after_one_step(text_batch(), accumulate=3), after_one_step(text_batch(), accumulate=3)
    assert one[0] == two[0]
    assert all(torch.equal(one[1][name], two[1][name]) for name in one[1])


def test_more_micro_batches_than_windows_are_refused():
    with pytest.raises(DataError, match=r"accumulate=9 exceeds data.batch=8"):
        after_one_step(text_batch(), accumulate=9)


def test_options_out_of_range_are_refused():
    with pytest.raises(ConfigError, match=r"\[optimizer\].*betas"):
        optim.build(models.build(TINY, 0), OptimizerOptions(betas=(0.9, 1.0)), 10)
