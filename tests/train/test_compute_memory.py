"""The syncer's tensors: what a fold may touch, and memory that is used again without anybody noticing."""

import numpy as np
import pytest
import torch

from archipel.errors import PayloadError
from archipel.protocol.messages import TensorSpec
from archipel.protocol.schedule import SyncOptions
from archipel.runtime.buffers import Buffers
from archipel.train.compute import OuterState

SHAPE = (16, 8)
OPTIONS = SyncOptions(fragments=1, interval_steps=1, push_codec="float32")


def outer_state(options: SyncOptions = OPTIONS) -> OuterState:
    torch.set_num_threads(1)
    state = OuterState((TensorSpec("w", SHAPE),), options)
    state.begin({"w": np.arange(128, dtype=np.float32).reshape(SHAPE)})
    return state


def push(scale: float) -> np.ndarray:
    return (scale * np.random.default_rng(0).standard_normal(128, np.float32)).view(np.uint8)


def merged(state: OuterState, payload: object, *, base: int = 0, full: bool = False) -> str:
    state.fold(0, payload, 1.0, base=base, full=full)
    state.merge(0, state.states[0].version + 1)
    return state.digest()


def test_a_push_folded_where_it_lies_counts_as_a_decoded_one():
    writable = bytearray(push(0.1))
    assert merged(outer_state(), writable) == merged(outer_state(), bytes(writable))


@pytest.mark.parametrize(
    ("base", "full"), [(1, False), (0, False), (0, True)], ids=["anchored", "late", "full"]
)
def test_a_fold_leaves_the_payload_as_it_was(base, full):
    state = outer_state()
    merged(state, push(0.1))
    payload = push(0.2)
    before = payload.copy()
    merged(state, payload, base=base, full=full)
    assert (payload == before).all()


@pytest.mark.parametrize("length", [0, 508, 516])
def test_a_float32_push_of_another_length_is_refused(length):
    state = outer_state()
    before = state.digest()
    with pytest.raises(PayloadError, match="512 bytes"):
        state.fold(0, bytearray(length), 1.0, base=0, full=False)
    assert state.digest() == before


def test_reused_memory_gives_the_bits_of_fresh_memory():
    fresh, reused = outer_state(), outer_state()
    reused.room = Buffers(kept=8).floats
    for _ in range(6):
        version = fresh.states[0].version
        expected = merged(fresh, push(0.1), base=version)
        assert merged(reused, push(0.1), base=version) == expected


def test_a_version_somebody_still_sends_is_not_written_over():
    state = outer_state()
    state.room = Buffers(kept=8).floats
    merged(state, push(0.1))
    sent = memoryview(state.update(0, 1))
    before = bytes(sent)
    for version in range(1, 6):
        merged(state, push(0.1), base=version)
    assert bytes(sent) == before


def test_a_long_run_asks_for_no_new_memory():
    buffers = Buffers(kept=8)
    state = outer_state()
    asked: list[int] = []

    def room(numel: int) -> np.ndarray:
        asked.append(buffers.unused)
        return buffers.floats(numel)

    state.room = room
    for version in range(6):
        merged(state, push(0.1), base=version)
    steady = asked[-4:]  # two sums, weights and momentum
    assert min(steady) > 0
