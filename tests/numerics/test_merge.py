"""Merging keeps what appendix D.2 promises, and a bad push leaves no trace."""

import copy
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from archipel.errors import PayloadError
from archipel.numerics.fragment import TensorShape, split
from archipel.numerics.merge import (
    Accumulator,
    Segment,
    average,
    finish,
    fold,
    radial_directional,
    reset,
    segments,
    start,
)

torch.set_num_threads(1)
LEARNERS = st.integers(1, 16)
SEEDS = st.integers(0, 2**31)


def vectors(learners: int, numel: int, seed: int, *, scale: float = 1.0) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [scale * torch.randn(numel, generator=generator) for _ in range(learners)]


def close(left: torch.Tensor, right: torch.Tensor, tolerance: float = 1e-6) -> bool:
    """Whether the distance is within `tolerance` of the length."""
    return bool((left.double() - right.double()).norm() <= tolerance * right.double().norm())


def rda_in_float64(gradients: list[torch.Tensor], weights: list[float]) -> torch.Tensor:
    wide = [gradient.double() for gradient in gradients]
    total = sum(weights)
    length = sum(w * v.norm() for w, v in zip(weights, wide, strict=True)) / total
    direction = sum(w * v / v.norm() for w, v in zip(weights, wide, strict=True))
    return length * direction / direction.norm()


def one_segment(numel: int, rule: str = "radial_directional", *, row: int = 0) -> Accumulator:
    return start((Segment("w", 0, numel, rule, row),), numel)


@settings(max_examples=40, deadline=None)
@given(LEARNERS, SEEDS, st.lists(st.floats(1e-3, 1e6), min_size=16, max_size=16))
def test_rda_is_its_formula(learners, seed, weights):
    gradients = vectors(learners, 700, seed)
    assert close(
        radial_directional(gradients, weights[:learners]), rda_in_float64(gradients, weights[:learners]), 3e-6
    )


@pytest.mark.parametrize("scale", [1.0, 1e-20, 1e20, 1e-38])
def test_one_learner_gets_its_gradient_back_to_the_bit(scale):
    (gradient,) = vectors(1, 1000, 1, scale=scale)
    assert torch.equal(radial_directional([gradient], [7.0]), gradient)
    assert torch.equal(average([gradient], [7.0]), gradient)


@settings(max_examples=20, deadline=None)
@given(LEARNERS, SEEDS, st.floats(1e-15, 1e15))
def test_identical_gradients_are_their_own_merge(learners, seed, scale):
    gradient = vectors(1, 3000, seed, scale=scale)[0]
    assert close(radial_directional([gradient] * learners, [2.0] * learners), gradient)


def test_a_constant_gradient_of_a_million_elements_is_its_own_merge():
    gradient = torch.full((1_000_003,), 0.123)
    assert close(radial_directional([gradient] * 3, [1.0, 2.0, 3.0]), gradient)


@pytest.mark.parametrize("learners", range(1, 17))
def test_orthogonal_gradients_keep_their_norm_where_the_average_shrinks(learners):
    gradients = [3.0 * row for row in torch.eye(16)[:learners]]
    weights = [1.0] * learners
    assert radial_directional(gradients, weights).norm().item() == pytest.approx(3.0, rel=1e-6)
    assert average(gradients, weights).norm().item() == pytest.approx(3.0 / math.sqrt(learners), rel=1e-6)


@settings(max_examples=30, deadline=None)
@given(LEARNERS, SEEDS, st.floats(1e-20, 1e20))
def test_only_ratios_of_weights_matter(learners, seed, scale):
    gradients = vectors(learners, 300, seed)
    weights = [1.0 + at for at in range(learners)]
    for merge in (average, radial_directional):
        assert close(merge(gradients, [scale * weight for weight in weights]), merge(gradients, weights))


@settings(max_examples=30, deadline=None)
@given(LEARNERS, SEEDS, st.randoms(use_true_random=False))
def test_order_matters_only_in_the_last_bits(learners, seed, chance):
    pairs = [(gradient, 1.0 + at) for at, gradient in enumerate(vectors(learners, 300, seed))]
    shuffled = chance.sample(pairs, len(pairs))
    for merge in (average, radial_directional):
        forward, other = (merge(*map(list, zip(*order, strict=True))) for order in (pairs, shuffled))
        assert close(forward, other, 2e-6)


def test_weights_count():
    gradients = [torch.tensor([4.0, 0.0]), torch.tensor([8.0, 0.0])]
    assert average(gradients, [3.0, 1.0]).tolist() == [5.0, 0.0]
    assert radial_directional(gradients, [3.0, 1.0]).tolist() == pytest.approx([5.0, 0.0])


def test_zero_gradients_merge_to_zero():
    assert torch.equal(radial_directional([torch.zeros(5)] * 3, [1.0] * 3), torch.zeros(5))


def test_a_zero_gradient_shortens_the_step_but_does_not_turn_it():
    merged = radial_directional([torch.tensor([0.0, 4.0]), torch.zeros(2)], [1.0, 1.0])
    assert merged.tolist() == pytest.approx([0.0, 2.0])


def test_cancelling_directions_fall_back_to_the_average():
    forward = vectors(1, 5000, 3)[0]
    merged = radial_directional([3.0 * forward, -forward], [1.0, 1.0])
    assert close(merged, forward)


@pytest.mark.parametrize("scale", [1e-36, 1e-25, 1e-10, 1e10, 1e25])
def test_norms_hold_where_squares_leave_float32(scale):
    left, right = torch.zeros(2000), torch.zeros(2000)
    left[:1000], right[1000:] = scale, scale
    merged = radial_directional([left, right], [1.0, 1.0]).double().norm().item()
    assert merged == pytest.approx(scale * math.sqrt(1000), rel=1e-5, abs=0)


def test_gradients_too_short_for_a_direction_are_averaged():
    gradients = [torch.tensor([4e-40, 0.0]), torch.tensor([0.0, 4e-40])]
    assert radial_directional(gradients, [1.0, 1.0]).tolist() == pytest.approx(
        [2e-40, 2e-40], rel=1e-4, abs=0
    )


@pytest.mark.parametrize("shape", [(), (0,), (3, 0), (1,), (2, 3, 4)])
def test_any_shape_comes_back(shape):
    for merge in (average, radial_directional):
        merged = merge([torch.ones(shape), torch.ones(shape)], [1.0, 3.0])
        assert merged.shape == shape and close(merged, torch.ones(shape))


def test_half_precision_gradients_are_summed_in_float32():
    gradients = [torch.ones(4, dtype=torch.bfloat16), torch.full((4,), 2.0**-9, dtype=torch.bfloat16)]
    assert torch.equal(average(gradients, [1.0, 1.0]), torch.full((4,), (1 + 2.0**-9) / 2))


@settings(max_examples=30, deadline=None)
@given(LEARNERS, SEEDS, st.sampled_from(["average", "radial_directional"]))
def test_streaming_equals_merging_each_tensor_to_the_bit(learners, seed, rule):
    gradients = vectors(learners, 1200, seed)
    weights = [float(1 + at) for at in range(learners)]
    acc = start(
        (Segment("a", 0, 500, rule), Segment("none", 500, 500, rule), Segment("b", 500, 1200, rule)), 1200
    )
    for gradient, weight in zip(gradients, weights, strict=True):
        fold(acc, gradient, weight)
    merge = average if rule == "average" else radial_directional
    parts = [
        merge([gradient[span] for gradient in gradients], weights) for span in (slice(500), slice(500, 1200))
    ]
    assert torch.equal(finish(acc), torch.cat(parts))


def test_rows_are_merged_each_in_its_own_direction():
    gradients = [gradient.view(6, 700) for gradient in vectors(5, 4200, 2)]
    weights = [1.0, 2.0, 3.0, 4.0, 5.0]
    acc = one_segment(4200, row=700)
    for gradient, weight in zip(gradients, weights, strict=True):
        fold(acc, gradient.reshape(-1), weight)
    merged = finish(acc).view(6, 700)
    for row in range(6):
        assert close(merged[row], radial_directional([gradient[row] for gradient in gradients], weights))


def test_a_row_that_cancels_is_averaged_and_the_others_are_not():
    acc = one_segment(4, row=2)
    fold(acc, torch.tensor([3.0, 0.0, 2.0, 0.0]), 1.0)
    fold(acc, torch.tensor([-1.0, 0.0, 0.0, 2.0]), 1.0)
    assert finish(acc).tolist() == pytest.approx([1.0, 0.0, math.sqrt(2), math.sqrt(2)])


def test_more_rows_than_a_chunk_holds():
    gradients = vectors(3, 70_000, 4)
    acc = one_segment(70_000, row=7)
    for gradient in gradients:
        fold(acc, gradient, 1.0)
    merged = finish(acc).view(-1, 7)
    for row in (0, 4680, 4681, 9999):
        expected = radial_directional([gradient.view(-1, 7)[row] for gradient in gradients], [1.0] * 3)
        assert close(merged[row], expected)


def test_a_fragment_as_one_direction_skips_what_is_averaged():
    rda = "radial_directional"
    parts = (
        Segment("a", 0, 2, rda, group=0),
        Segment("e", 2, 4, "average"),
        Segment("b", 4, 6, rda, group=0),
    )
    acc = start(parts, 6)
    left, right = torch.tensor([3.0, 0, 1, 1, 0, 4]), torch.tensor([0, 4.0, 3, 3, 3, 0])
    fold(acc, left, 1.0)
    fold(acc, right, 1.0)
    merged = finish(acc)
    outside = torch.tensor([True, True, False, False, True, True])
    assert close(merged[outside], radial_directional([left[outside], right[outside]], [1.0, 1.0]))
    assert merged[2:4].tolist() == [2.0, 2.0]


def test_buffers_are_reused_without_a_trace_of_what_they_held():
    acc = one_segment(100)
    fold(acc, torch.full((100,), 1e20), 1.0)
    reset(acc)
    values, units = acc.values.data_ptr(), acc.units.data_ptr()
    acc.values.fill_(math.nan)
    acc.units.fill_(math.nan)
    gradients = vectors(2, 100, 6)
    for gradient in gradients:
        fold(acc, gradient, 1.0)
    assert torch.equal(finish(acc), radial_directional(gradients, [1.0, 1.0]))
    assert (acc.values.data_ptr(), acc.units.data_ptr()) == (values, units)


def test_finish_leaves_the_accumulator_ready_for_the_next_round():
    acc = one_segment(10)
    fold(acc, torch.ones(10), 5.0)
    finish(acc)
    fold(acc, torch.full((10,), 2.0), 1.0)
    assert torch.equal(finish(acc), torch.full((10,), 2.0))


def test_averaging_alone_needs_no_second_vector():
    assert one_segment(1000, "average").units.numel() == 0


def test_a_fold_does_not_change_the_push():
    push = torch.ones(10)
    acc = one_segment(10)
    fold(acc, push, 1.0)
    fold(acc, push, 3.0)
    finish(acc)
    assert torch.equal(push, torch.ones(10))


def test_the_bits_do_not_depend_on_where_a_push_lies_in_memory():
    pushes = vectors(3, 5001, 8)
    results = []
    for shift in (0, 1, 3):
        acc = one_segment(5001)
        for push in pushes:
            moved = torch.empty(5010)[shift : shift + 5001]
            fold(acc, moved.copy_(push), 1.0)
        results.append(finish(acc).clone())
    assert torch.equal(results[0], results[1]) and torch.equal(results[0], results[2])


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("rule", ["average", "radial_directional"])
@pytest.mark.parametrize("folded", [0, 2])
def test_a_push_that_is_not_finite_is_refused_by_tensor_and_leaves_no_trace(bad, rule, folded):
    acc = start((Segment("good", 0, 600, rule), Segment("model.bad", 600, 1300, rule)), 1300)
    pushes = vectors(folded + 1, 1300, 9)
    for push in pushes[:folded]:
        fold(acc, push, 2.0)
    before = copy.deepcopy(acc)
    spoiled = pushes[-1].clone()
    spoiled[1299] = bad
    with pytest.raises(PayloadError, match=r"model\.bad"):
        fold(acc, spoiled, 2.0)
    assert (acc.count, acc.weight, acc.unit, acc.bounds) == (
        before.count,
        before.weight,
        before.unit,
        before.bounds,
    )
    fold(acc, pushes[-1], 2.0)
    fold(before, pushes[-1], 2.0)
    assert torch.equal(finish(acc), finish(before))


def test_a_push_not_finite_in_one_row_is_refused():
    acc = one_segment(6, row=2)
    with pytest.raises(PayloadError):
        fold(acc, torch.tensor([1.0, 1, 1, math.nan, 1, 1]), 1.0)
    assert acc.count == 0


@pytest.mark.parametrize("rule", ["average", "radial_directional"])
@pytest.mark.parametrize("row", [0, 4])
@pytest.mark.parametrize("size", [3e38, 1e37, 1e31, 9e29, 1e25])
@pytest.mark.parametrize("weights", [(1.0, 1.0, 1.0), (1e-9, 1e9, 1.0), (1e9, 1e-9, 1.0)])
def test_finite_pushes_of_any_size_are_refused_or_merge_to_finite(rule, row, size, weights):
    acc = one_segment(64, rule, row=row if rule == "radial_directional" else 0)
    fold(acc, torch.ones(64), weights[0])
    for sign, weight in zip((1.0, -1.0), weights[1:], strict=True):
        try:
            fold(acc, torch.full((64,), sign * size), weight)
        except PayloadError as error:
            assert "w" in str(error)
    merged = finish(acc)
    assert torch.isfinite(merged).all()


def test_a_push_near_the_end_of_float32_is_refused():
    acc = one_segment(8)
    with pytest.raises(PayloadError, match="norm"):
        fold(acc, torch.full((8,), 3e38), 1.0)
    assert acc.count == 0


def test_many_pushes_cannot_add_up_to_infinity():
    acc = one_segment(4, "average")
    refused = 0
    for _ in range(1000):
        try:
            fold(acc, torch.full((4,), 4e29), 1.0)
        except PayloadError:
            refused += 1
    assert refused > 900 and torch.isfinite(finish(acc)).all()


def test_a_light_first_push_does_not_shut_out_heavy_ones():
    acc = one_segment(4)
    fold(acc, torch.ones(4), 1.0)
    fold(acc, torch.full((4,), 3.0), 1e16)
    assert close(finish(acc), torch.full((4,), 3.0))


def rules(granularity: str = "tensor", **keywords: str) -> dict[str, Segment]:
    shapes = [
        TensorShape("model.embed_tokens.weight", (10, 4)),
        TensorShape("model.layers.0.w", (6, 4)),
        TensorShape("norm", (4,)),
        TensorShape("running_mean", (4,), "buffer"),
        TensorShape("scale", ()),
        TensorShape("nothing", (0, 4)),
    ]
    (fragment,) = split(shapes, 1, "balanced")
    options = {"merge": "radial_directional", "embedding_merge": "average"} | keywords
    found = segments(fragment, granularity=granularity, embedding_patterns=("*embed*",), **options)
    start(found, fragment.numel)
    return {segment.name: segment for segment in found}


def test_embeddings_and_buffers_are_averaged_and_the_rest_is_radial_directional():
    averaged = {name for name, segment in rules().items() if segment.rule == "average"}
    assert averaged == {"model.embed_tokens.weight", "running_mean"}


def test_each_rule_can_be_chosen():
    averaged = {
        name
        for name, segment in rules(merge="average", embedding_merge="radial_directional").items()
        if segment.rule == "average"
    }
    assert averaged == {"model.layers.0.w", "norm", "running_mean", "scale", "nothing"}


def test_row_granularity_gives_matrices_a_direction_a_row():
    found = rules("row")
    assert {name: segment.row for name, segment in found.items() if segment.row} == {"model.layers.0.w": 4}


def test_fragment_granularity_gives_all_one_direction():
    found = rules("fragment")
    assert {segment.group for segment in found.values() if segment.rule == "radial_directional"} == {0}
    assert found["running_mean"].group == -1


def test_parts_of_a_split_tensor_are_directions_of_their_own():
    for fragment in split([TensorShape("h.0.w", (9, 8)), TensorShape("h.0.b", (20,))], 4, "subtensor"):
        for granularity in ("tensor", "row"):
            found = segments(
                fragment,
                merge="radial_directional",
                granularity=granularity,
                embedding_merge="average",
                embedding_patterns=(),
            )
            acc = start(found, fragment.numel)
            fold(acc, torch.ones(fragment.numel), 1.0)
            fold(acc, torch.ones(fragment.numel), 1.0)
            assert close(finish(acc), torch.ones(fragment.numel))
