"""Fragments hold every element once, balance, and come out the same for every worker."""

import itertools
import random
import warnings
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from archipel.errors import ModelError
from archipel.numerics.fragment import Fragment, TensorShape, describe, split

STRATEGIES = ("balanced", "layer", "tensor", "subtensor")
SIZES = st.sampled_from([0, 1, 2, 3, 7, 100, 50_257, 10**9])
SHAPES = st.lists(st.lists(SIZES, max_size=3).map(tuple), min_size=1, max_size=14)


def tensors(*sizes: int) -> list[TensorShape]:
    return [TensorShape(f"model.layers.{at}.weight", (size,)) for at, size in enumerate(sizes)]


def quietly(*arguments, **keywords) -> tuple[Fragment, ...]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return split(*arguments, **keywords)


def sizes(fragments: tuple[Fragment, ...]) -> list[int]:
    return [fragment.numel for fragment in fragments]


def names(fragments: tuple[Fragment, ...]) -> list[set[str]]:
    return [{piece.name for piece in fragment.pieces} for fragment in fragments]


@settings(max_examples=150, deadline=None)
@given(SHAPES, st.integers(1, 9), st.sampled_from(STRATEGIES), st.randoms(use_true_random=False))
def test_every_element_lies_in_exactly_one_piece_whatever_the_order_given(shapes, count, strategy, chance):
    given_tensors = [TensorShape(f"model.layers.{at}.w", shape) for at, shape in enumerate(shapes)]
    fragments = quietly(given_tensors, count, strategy)

    assert [fragment.index for fragment in fragments] == list(range(count))
    for fragment in fragments:
        end = 0
        for piece in fragment.pieces:
            assert piece.offset == end
            end += piece.stop - piece.start
        assert end == fragment.numel
    pieces = sorted(
        (piece for fragment in fragments for piece in fragment.pieces),
        key=lambda piece: (piece.name, piece.start),
    )
    for tensor in given_tensors:
        own = [piece for piece in pieces if piece.name == tensor.name]
        assert own[0].start == 0 and own[-1].stop == tensor.numel
        assert all(left.stop == right.start for left, right in itertools.pairwise(own))

    shuffled = list(given_tensors)
    chance.shuffle(shuffled)
    assert quietly(shuffled, count, strategy) == fragments


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(1, 60), min_size=1, max_size=7), st.integers(1, 4))
def test_largest_balanced_fragment_is_within_four_thirds_of_the_optimum(numels, count):
    optimum = min(
        max(
            sum(size for size, bin in zip(numels, choice, strict=True) if bin == index)
            for index in range(count)
        )
        for choice in itertools.product(range(count), repeat=len(numels))
    )
    assert 3 * max(sizes(quietly(tensors(*numels), count, "balanced"))) <= 4 * optimum


def test_balanced_fragments_of_a_real_model_are_nearly_even():
    chance = random.Random(5)
    numels = [chance.choice([4096, 65_536, 262_144, 1_048_576]) for _ in range(300)]
    found = sizes(split(tensors(*numels), 24, "balanced"))
    assert max(found) <= 4 / 3 * max(sum(numels) / 24, *numels)
    assert max(found) - min(found) <= max(numels)


def test_balanced_ties_go_by_name_then_by_fragment():
    fragments = split([TensorShape(name, (5,)) for name in "dbca"], 2, "balanced")
    assert names(fragments) == [{"a", "c"}, {"b", "d"}]


def test_tensor_strategy_deals_tensors_out_in_turn():
    given_tensors = [TensorShape(f"h.{at}.w", (2, 3)) for at in range(1, 10)] + [TensorShape("wte", (9, 3))]
    assert names(split(given_tensors, 4, "tensor")) == [
        {"wte"},
        {"h.1.w", "h.4.w", "h.7.w"},
        {"h.2.w", "h.5.w", "h.8.w"},
        {"h.3.w", "h.6.w", "h.9.w"},
    ]


def test_layer_strategy_strides_whole_layers():
    given_tensors = [
        TensorShape(f"model.layers.{at}.{part}", (4,)) for at in range(1, 7) for part in ("mlp", "attention")
    ]
    given_tensors += [TensorShape("model.norm", (4,)), TensorShape("model.embed_tokens", (8, 4))]
    found = [
        sorted({name.split(".")[2] for name in group})
        for group in names(split(given_tensors, 4, "layer"))[1:]
    ]
    assert found == [["1", "4"], ["2", "5"], ["3", "6"]]


def test_layer_ten_comes_after_layer_nine():
    given_tensors = [TensorShape(f"blocks.{at}.w", (1,)) for at in range(12)] + [TensorShape("head", (1,))]
    assert names(split(given_tensors, 4, "layer"))[1] == {f"blocks.{at}.w" for at in (0, 3, 6, 9)}


def test_layers_of_two_stacks_are_told_apart():
    given_tensors = [TensorShape(f"{side}.layers.0.w", (1,)) for side in ("encoder", "decoder")]
    given_tensors.append(TensorShape("head", (1,)))
    assert names(split(given_tensors, 3, "layer")) == [
        {"head"},
        {"decoder.layers.0.w"},
        {"encoder.layers.0.w"},
    ]


def test_layer_pattern_of_the_users_own_names():
    given_tensors = [TensorShape("stage1_w", (1,)), TensorShape("stage2_w", (1,)), TensorShape("x", (1,))]
    found = names(split(given_tensors, 3, "layer", layer_pattern=r"stage\d+"))
    assert found == [{"x"}, {"stage1_w"}, {"stage2_w"}]


def test_subtensor_fragments_are_even_to_a_row_and_cut_at_rows():
    given_tensors = [TensorShape("embed", (1000, 16)), TensorShape("w", (48, 16)), TensorShape("b", (7,))]
    fragments = split(given_tensors, 5, "subtensor")
    even = sum(tensor.numel for tensor in given_tensors) / 5
    assert all(abs(size - even) <= 16 for size in sizes(fragments))
    for piece in (piece for fragment in fragments for piece in fragment.pieces if piece.name != "b"):
        assert piece.start % 16 == piece.stop % 16 == 0
        assert piece.row == 16


def test_one_huge_tensor_splits_without_rounding():
    found = sizes(split([TensorShape("w", (3 * 10**17, 1))], 3, "subtensor"))
    assert found == [10**17] * 3


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_surplus_fragments_are_empty_and_announced(strategy):
    given_tensors = [TensorShape("layers.0.w", (2, 2)), TensorShape("head", (1,))]
    with pytest.warns(UserWarning, match=r"sync\.fragments=9 leaves \d fragments empty"):
        fragments = split(given_tensors, 9, strategy)
    assert len(fragments) == 9 and sum(sizes(fragments)) == 5
    assert all(fragment.numel == 0 for fragment in fragments if not fragment.pieces)


def test_enough_tensors_give_no_warning():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        split(tensors(1, 1, 0), 3, "balanced")


def test_scalars_count_one_and_empty_tensors_nothing():
    assert (TensorShape("scale", ()).numel, TensorShape("none", (0, 7)).numel) == (1, 0)
    fragments = split([TensorShape("scale", ()), TensorShape("none", (0, 7))], 1, "balanced")
    assert [(piece.name, piece.start, piece.stop) for piece in fragments[0].pieces] == [
        ("none", 0, 0),
        ("scale", 0, 1),
    ]


def test_buffers_keep_their_kind():
    (fragment,) = split([TensorShape("mean", (3,), "buffer"), TensorShape("w", (3,))], 1, "balanced")
    assert Counter(piece.kind for piece in fragment.pieces) == {"buffer": 1, "parameter": 1}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (([], 2, "balanced"), "no tensor"),
        ((tensors(1), 0, "balanced"), "at least 1"),
        ((tensors(1), 1, "alphabetical"), "alphabetical"),
        (([TensorShape("w", (1,)), TensorShape("w", (2,))], 1, "balanced"), "'w'"),
        (([TensorShape("w", (-1,))], 1, "balanced"), "negative"),
        (([TensorShape("w", (1,), "moment")], 1, "balanced"), "moment"),
        (([TensorShape("w", (1,)), TensorShape("v", (1,))], 2, "layer"), "balanced"),
    ],
)
def test_impossible_requests_say_what_is_wrong(arguments, message):
    with pytest.raises(ModelError, match=message):
        split(*arguments)


def test_a_broken_layer_pattern_is_a_model_error():
    with pytest.raises(ModelError, match="regular expression"):
        split(tensors(1), 1, "layer", layer_pattern="(")


def test_description_names_sizes_and_empty_fragments():
    text = describe(quietly(tensors(3_000, 1_000), 3, "balanced"))
    assert "3,000" in text and "75.0%" in text and "(empty)" in text
