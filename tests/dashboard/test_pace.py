"""What counts of a step, how stretches add up, and that memory stays bounded."""

import random

import pytest

from archipel.dashboard.pace import Cover, Pace, Sample, useful_s


@pytest.mark.parametrize(
    ("before", "took", "after", "counts"),
    [
        (1.0, 16.0, 1.2, 1.2),  # stopped within a step
        (1.0, 4.0, 4.0, 4.0),  # the first of several slow ones
        (4.0, 4.0, 1.0, 4.0),  # the last of them
        (1.0, 3.0, 1.0, 3.0),  # slow, within three
        (None, 9.0, None, 9.0),  # nothing to compare with
        (None, 9.0, 1.0, 1.0),
    ],
)
def test_a_step_far_longer_than_both_neighbours_stood_still(
    before: float | None, took: float, after: float | None, counts: float
) -> None:
    assert useful_s(before, took, after) == counts


def pace() -> Pace:
    return Pace(Cover(), 0.0, 0.0)


def test_time_is_stepping_standing_still_and_absent() -> None:
    learner = pace()
    for now, took in ((1, 1), (2, 1), (12, 10), (13, 1)):
        learner.step(now, took, 100)
    learner.begins(20.0)
    learner.step(22, 2, 100)
    learner.ends()
    assert (learner.stepping_s, learner.stood_still_s, learner.absent_s) == (6, 9, 7)
    assert (learner.steps, learner.tokens, learner.time_s(30.0)) == (5, 500, 30)
    assert learner.cover.total_s == 6


def test_a_goodbye_ends_a_learners_time_until_it_comes_back() -> None:
    learner = pace()
    learner.step(4, 4, 1)
    learner.parted_s = 5.0
    assert learner.time_s(30.0) == 5
    learner.begins(10.0)
    assert learner.time_s(30.0) == 30


def test_steps_that_were_not_heard_count_as_long_as_the_one_that_was() -> None:
    learner = pace()
    learner.step(1, 1, 100)
    learner.step(4, 1, 300, steps=3)
    learner.step(5, 1, 200, steps=2)  # no time for the other one
    learner.ends()
    assert (learner.steps, learner.tokens, learner.stepping_s, learner.cover.total_s) == (6, 600, 5, 5)


def test_stretches_in_any_order_cover_what_their_union_does() -> None:
    chance = random.Random(0)
    stretches = [(start, start + chance.randint(1, 9)) for start in chance.choices(range(500), k=90)]
    cover = Cover()
    for start, end in stretches:
        cover.add(start, end)
    assert cover.total_s == len({second for start, end in stretches for second in range(start, end)})


def test_a_cover_forgets_where_old_stretches_were_but_not_how_much_they_covered() -> None:
    cover = Cover(most=10)
    for second in range(1000):
        cover.add(2 * second, 2 * second + 1)
    assert cover.total_s == 1000 and len(cover._stretches) <= 10
    cover.add(0, 1990)  # most of it is settled by now
    assert cover.total_s < 1000 + 11


def test_a_sample_keeps_few_values_and_knows_the_middle_of_all() -> None:
    sample = Sample(most=64)
    for value in range(10_001):
        sample.add(value)
    assert len(sample._values) <= 64
    assert (sample.count, sample.mean, sample.greatest) == (10_001, 5000, 10_000)
    assert sample.median == pytest.approx(5000, rel=0.03)
    assert Sample().table() is None
