"""Compute ports with tensors: a step takes the rows and the threads its driver says, and goes on anywhere."""

import numpy as np
import pytest
import torch

from archipel.config import load, settings_of
from archipel.errors import TapeError
from archipel.roles.local import LocalLearner
from archipel.train import data

SMALL = [
    "sync.fragments=2", "sync.interval_steps=4", "sync.error_feedback=true", "model.width=16",
    "model.layers=1", "model.heads=2", "model.vocabulary=256", "model.sequence=16",
    "data.sequence=16", "data.batch=4",
]  # fmt: skip


def learner(threads: int = 0) -> LocalLearner:
    config = load(None, SMALL)
    port = LocalLearner(config, data.load(config.data), threads=threads)
    port.prepare(settings_of(config), 0, 0)
    return port


def test_a_step_takes_the_batch_of_the_settings() -> None:
    assert learner().step(1, 0)[0] == 4 * 16


def test_a_step_takes_the_rows_it_is_told_to() -> None:
    port = learner()
    assert [port.step(number, 0, rows)[0] for number, rows in enumerate((2, 1, None), 1)] == [32, 16, 64]


def test_a_smaller_batch_leaves_no_gap_in_the_data() -> None:
    halves, whole = learner(), learner()
    halves.step(1, 0, 2)
    halves.step(2, 0, 2)
    whole.step(1, 0)
    assert halves.position == whole.position == 4 * 16


def test_rows_follow_from_tokens_or_are_refused() -> None:
    port = learner()
    assert port.rows(48) == 3
    for tokens in (0, 40):
        with pytest.raises(TapeError, match="no whole number of windows of 16"):
            port.rows(tokens)


def test_a_step_computes_on_the_threads_of_its_learner() -> None:
    before = torch.get_num_threads()
    try:
        for threads in (2, 1):
            learner(threads).step(1, 0)
            assert torch.get_num_threads() == threads
    finally:
        torch.set_num_threads(before)


def test_a_state_goes_on_with_the_same_bits() -> None:
    """Weights, moments, copies, bases and residuals; also into a port that was at another place."""
    straight = learner()
    straight.copy((0, 1))
    for fragment in (0, 1):
        numel = straight._parameters.numels[fragment]
        straight.apply(fragment, 1, np.zeros(numel, np.float32).view(np.uint8))
    straight.step(1, 0)
    straight.step(2, 1)
    again = learner()
    again.prepare({}, 0, straight.position)
    again.load({name: np.array(array) for name, array in straight.state().items()})
    for port in (straight, again):
        port.copy((0, 1))
        port.step(3, 2, 3)
    assert straight.loss == again.loss and straight.position == again.position
    for full in (False, True):
        pushes = [port.snapshot(1, 3, full=full).tobytes() for port in (straight, again)]
        assert pushes[0] == pushes[1]
