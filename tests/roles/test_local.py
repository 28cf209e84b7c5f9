"""Compute ports with tensors: a step takes as many rows as its driver says."""

from archipel.config import load, settings_of
from archipel.roles.local import LocalLearner
from archipel.train import data

SMALL = ["sync.fragments=2", "sync.interval_steps=4", "model.width=16", "model.layers=1", "model.heads=2",
         "model.vocabulary=256", "model.sequence=16", "data.sequence=16", "data.batch=4"]  # fmt: skip


def learner() -> LocalLearner:
    config = load(None, SMALL)
    port = LocalLearner(config, data.load(config.data))
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
