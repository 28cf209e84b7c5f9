"""Learners whose courier is heard and whose trainer hangs: who goes on without them, and who is told."""

from archipel.protocol import messages as m

from .test_syncer import Bench, bench, only


def beat(made: Bench, *names: str, seconds: int) -> list[m.Action]:
    """A heartbeat of each of them, every second, and nothing else."""
    heard: list[m.Action] = []
    for _ in range(seconds):
        made.now += 1.0
        heard += [action for name in names for action in made.hear(name, m.Heartbeat())]
    return heard


def test_with_quorum_live_a_trainer_that_hangs_is_left_behind() -> None:
    made = bench("L-0", "L-1", quorum=2, quorum_live=True, fragments=1, interval_steps=50)
    made.step("L-1", after_s=1.0)
    made.step("L-0")
    waited = [*made.step("L-0"), *beat(made, "L-0", "L-1", seconds=59)]
    assert not only(waited, m.Tally)
    assert [tally.workers for tally in only(beat(made, "L-0", "L-1", seconds=1), m.Tally)] == [("L-0",)]
    assert only(made.step("L-0", after_s=1.0), m.Tally)  # and is not waited for again
    made.step("L-1")
    assert [tally.workers for tally in only(made.step("L-0"), m.Tally)] == [("L-0", "L-1")]


def test_without_quorum_live_a_trainer_that_hangs_is_named_once() -> None:
    made = bench("L-0", "L-1", quorum=2, fragments=1, interval_steps=50)
    made.step("L-1", after_s=1.0)
    made.step("L-0")
    made.step("L-0")
    assert not only(beat(made, "L-0", "L-1", seconds=59), m.Notice)
    [notice] = only(beat(made, "L-0", "L-1", seconds=600), m.Notice)
    assert isinstance(notice, m.Notice) and notice.level == "warning"
    assert notice.text.startswith("waiting for steps silent=L-1 quorum=2: ")
    assert "quorum_live" in notice.text
    assert only(made.step("L-1"), m.Tally)


def test_a_trainer_that_hangs_is_not_named_where_the_others_suffice() -> None:
    # L-0's steps take 70 s: it is late, L-1 hangs, and one of them is enough.
    made = bench("L-0", "L-1", quorum=1, grace=False, fragments=1, interval_steps=50)
    made.syncer.members["L-0"].step_s.add(70.0)
    made.step("L-1", after_s=1.0)
    assert not only(beat(made, "L-0", "L-1", seconds=69), m.Notice)
    assert only(made.step("L-0", after_s=1.0), m.Tally)


def test_where_all_trainers_hang_another_quorum_is_not_advised() -> None:
    made = bench("L-0", "L-1", quorum=1, fragments=1, interval_steps=50)
    made.step("L-1", after_s=1.0)
    [notice] = only(beat(made, "L-0", "L-1", seconds=600), m.Notice)
    assert isinstance(notice, m.Notice) and notice.text.endswith("restart them")
