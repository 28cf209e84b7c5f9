"""The syncer's tensors against torch's own optimizer; and refusals that change nothing."""

import numpy as np
import pytest
import torch

from archipel.errors import CheckpointError, PayloadError
from archipel.numerics import codec
from archipel.protocol.messages import TensorSpec
from archipel.protocol.schedule import SyncOptions
from archipel.runtime.courier import round_as_held
from archipel.runtime.frames import Rounded
from archipel.train.compute import OuterState

torch.set_num_threads(1)
SCHEMA = (TensorSpec("a", (4, 3)), TensorSpec("b", (6,)), TensorSpec("stat", (2,), "buffer"))
OPTIONS = SyncOptions(
    fragments=1, interval_steps=4, merge="average", outer_lr=0.7, outer_momentum=0.9, push_codec="float32"
)


def begun(schema=SCHEMA, **changes) -> OuterState:
    import msgspec

    outer = OuterState(schema, msgspec.structs.replace(OPTIONS, **changes))
    generator = np.random.default_rng(0)
    outer.begin({s.name: generator.standard_normal(s.shape, np.float32) for s in schema})
    return outer


def push(
    outer: OuterState, values: np.ndarray, weight: float = 1.0, *, base: int | None = None, full=False
) -> None:
    base = outer.states[0].version if base is None else base
    name = "float32" if full else outer.options.push_codec
    outer.fold(0, codec.encode(name, values, outer.options.codec_block), weight, base=base, full=full)


def digests(outer: OuterState) -> tuple[str, str]:
    return outer.digest(), outer.momentum_digest()


def random(seed: int, numel: int = 20) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(numel).astype(np.float32)


def test_rounds_follow_sgd_with_nesterov_momentum_on_the_weighted_mean():
    outer = begun()
    reference = torch.nn.Parameter(outer.states[0].weights[:18].clone())
    optimizer = torch.optim.SGD([reference], lr=0.7, momentum=0.9, nesterov=True)
    for number in range(1, 6):
        first, second = random(2 * number), random(2 * number + 1)
        push(outer, first, 1.0)
        push(outer, second, 3.0)
        outer.merge(0, number)
        reference.grad = torch.from_numpy((first + 3 * second) / 4)[:18]
        optimizer.step()
        torch.testing.assert_close(outer.states[0].weights[:18], reference.detach(), atol=1e-6, rtol=1e-6)


def test_buffers_become_the_learners_mean_without_momentum():
    outer = begun()
    for number in (1, 2, 3):
        start = outer.states[0].weights[18:].clone()
        push(outer, np.full(20, 2.0, np.float32))
        push(outer, np.full(20, 4.0, np.float32))
        outer.merge(0, number)
        assert torch.equal(outer.states[0].weights[18:], start - 3.0)
        assert not outer.states[0].momentum[18:].any()


def test_late_push_is_anchored_anew_on_the_current_version():
    late, prompt = begun(), begun()
    for outer in (late, prompt):
        push(outer, random(1))
        outer.merge(0, 1)
    before, now = late.states[0].before, late.states[0].weights
    local = before - torch.from_numpy(random(2))
    push(late, (before - local).numpy(), base=0)
    push(prompt, (now - local).numpy(), base=1)
    late.merge(0, 2)
    prompt.merge(0, 2)
    torch.testing.assert_close(late.states[0].weights, prompt.states[0].weights)


def test_push_in_full_equals_its_difference():
    full, difference = begun(push_codec="bf16"), begun()
    local = full.states[0].weights - torch.from_numpy(random(1))
    push(full, local.numpy(), full=True)
    push(difference, (difference.states[0].weights - local).numpy())
    full.merge(0, 1)
    difference.merge(0, 1)
    assert full.digest() == difference.digest()


def test_base_that_is_not_kept_is_refused():
    outer = begun()
    for number in (1, 2):
        push(outer, random(number))
        outer.merge(0, number)
    before = digests(outer)
    with pytest.raises(PayloadError, match="base version 0 is not kept; the current one is 2"):
        push(outer, random(9), base=0)
    assert digests(outer) == before


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf, 3e38])
@pytest.mark.parametrize("merge", ["average", "radial_directional"])
def test_unusable_push_is_refused_by_name_and_leaves_no_trace(bad, merge):
    outer, clean = begun(merge=merge), begun(merge=merge)
    poisoned = random(1)
    poisoned[14] = bad
    push(outer, random(2))
    push(clean, random(2))
    before = digests(outer)
    with pytest.raises(PayloadError, match="outer gradient of b"):
        push(outer, poisoned)
    assert digests(outer) == before
    for each in (outer, clean):
        push(each, random(3))
        each.merge(0, 1)
    assert digests(outer) == digests(clean)


def test_refused_first_push_leaves_the_round_empty():
    outer = begun()
    with pytest.raises(PayloadError):
        push(outer, np.full(20, np.nan, np.float32))
    push(outer, np.ones(20, np.float32))
    outer.merge(0, 1)
    assert torch.isfinite(outer.states[0].weights).all()


def test_overflow_in_the_outer_step_drops_the_round_and_changes_nothing():
    outer = begun(outer_lr=99.0)
    large = torch.full((20,), 3e38)
    outer.states[0] = type(outer.states[0])(0, -large, torch.zeros(20))
    push(outer, np.full(20, 1e29, np.float32))
    outer.merge(0, 1)
    before = digests(outer)
    outer.states[0] = type(outer.states[0])(1, outer.states[0].weights, large.clone())
    held = digests(outer)
    push(outer, np.full(20, 1e29, np.float32))
    with pytest.raises(PayloadError, match="outer step of fragment 0 overflows float32"):
        outer.merge(0, 2)
    assert digests(outer) == held and before[0] == held[0]
    assert outer.states[0].version == 1


def test_payload_of_another_length_is_refused():
    outer = begun()
    before = digests(outer)
    with pytest.raises(PayloadError, match="takes 80 bytes, got 76"):
        outer.fold(0, bytes(76), 1.0, base=0, full=False)
    assert digests(outer) == before
    assert outer.push_bytes(0, full=False) == 80


def test_discarded_round_leaves_no_trace():
    outer, clean = begun(), begun()
    push(outer, random(1))
    outer.discard(0)
    for each in (outer, clean):
        push(each, random(2))
        each.merge(0, 1)
    assert digests(outer) == digests(clean)


def test_empty_fragments_and_tensors_go_through_a_round():
    schema = (TensorSpec("none", (0, 4)), TensorSpec("scalar", ()))
    with pytest.warns(UserWarning, match="leaves 1 fragments empty"):
        outer = OuterState(schema, SyncOptions(fragments=3, interval_steps=4, push_codec="int4"))
    outer.begin({"none": np.zeros((0, 4), np.float32), "scalar": np.array(2.0, np.float32)})
    for fragment in outer.fragments:
        payload = codec.encode("int4", np.ones(fragment.numel, np.float32), 128)
        outer.fold(fragment.index, payload, 1.0, base=0, full=False)
        outer.merge(fragment.index, 1)
    assert [state.version for state in outer.states] == [1, 1, 1]
    tensors = outer.tensors()
    assert tensors["none"].shape == (0, 4) and tensors["scalar"].shape == () and tensors["scalar"] < 2.0


def test_version_that_is_being_sent_does_not_change_under_a_merge():
    outer = begun()
    sent = outer.update(0, 0)
    bytes_before = bytes(sent)
    push(outer, random(1))
    outer.merge(0, 1)
    assert bytes(sent) == bytes_before == bytes(outer.update(0, 0))
    assert bytes(outer.update(0, 1)) != bytes_before


def test_checkpoint_restores_weights_momentum_and_versions_bit_for_bit():
    outer, again = begun(), begun()
    for number in (1, 2, 3):
        push(outer, random(number))
        outer.merge(0, number)
    held = outer.arrays(list(outer.states))
    again.restore(held["weights"].items(), held["momentum"].items(), [3])
    assert digests(again) == digests(outer) and again.states[0].version == 3
    for each in (outer, again):
        push(each, random(9))
        each.merge(0, 4)
    assert digests(again) == digests(outer)


def test_checkpoint_of_another_split_is_refused():
    outer = begun()
    with pytest.raises(CheckpointError, match="does not have 20 elements"):
        outer.restore([("00000", np.zeros(7, np.float32))], [("00000", np.zeros(7, np.float32))], [1])


def test_states_taken_earlier_keep_their_digest():
    outer = begun()
    states, before = list(outer.states), digests(outer)
    push(outer, random(1))
    outer.merge(0, 1)
    assert (outer.digest(states), outer.momentum_digest(states)) == before != digests(outer)


def test_sums_of_a_round_do_not_grow_with_the_number_of_learners():
    outer = begun(merge="radial_directional")
    push(outer, random(0))
    sums = outer._sums[0]
    held = sums.values.numel() + sums.units.numel()
    for seed in range(1, 17):
        push(outer, random(seed))
    assert outer._sums[0] is sums and sums.values.numel() + sums.units.numel() == held


def test_small_updates_of_a_bfloat16_learner_are_not_lost():
    """An inner step moves its weights by 1/16; times the outer lr, bfloat16 rounds that away."""
    outer = begun((TensorSpec("norm", (8,)),), outer_lr=1e-3, outer_momentum=0.0)
    outer.begin({"norm": np.ones(8, np.float32)})
    inner = 2.0**-4
    assert torch.equal(torch.tensor(1 - 1e-3 * inner).bfloat16(), torch.tensor(1.0).bfloat16())
    for number in range(1, 101):
        base = np.frombuffer(outer.update(0, number - 1), np.float32).copy()
        round_as_held(0, base, (Rounded(0, 0, 8, "bfloat16"),))
        assert (base == torch.from_numpy(base).bfloat16().float().numpy()).all()
        local = base - inner
        push(outer, base - local)
        outer.merge(0, number)
    moved = 1.0 - outer.states[0].weights
    torch.testing.assert_close(moved, torch.full((8,), 100 * 1e-3 * inner), rtol=1e-3, atol=0.0)
    # Drifting on at 1e-4 a round, the weight a bfloat16 learner adopts leaves 1.0 as well.
    for number in range(101, 201):
        push(outer, np.full(8, 0.1, np.float32))
        outer.merge(0, number)
    adopted = np.frombuffer(outer.update(0, 200), np.float32).copy()
    round_as_held(0, adopted, (Rounded(0, 0, 8, "bfloat16"),))
    assert (adopted < 1.0).all()
