"""The witness must see what it says it sees: each forbidden thing, shown to it once."""

import pytest

from archipel.protocol import messages as m
from archipel.protocol.schedule import SyncOptions
from archipel.sim.witness import Witness

OPTIONS = SyncOptions(quorum=2, fragments=1, interval_steps=1, overlap_steps=0, pulls_max=2)


def tally(tick: int, *workers: str) -> m.Tally:
    return m.Tally(tick, workers, 1.0, 0.0, 0.0, 0.0, 0.0)


def pull(worker: str, tick: int = 1) -> m.Send:
    return m.Send(worker, m.Pull(0, tick, 0))


def fold(worker: str, base: int = 0, weight: float = 1.0) -> m.Fold:
    return m.Fold(0, worker, weight, base)


def told(*steps: tuple[m.Event, list[m.Action]], worker: str = m.SYNCER) -> Witness:
    witness = Witness(OPTIONS)
    for now, (event, actions) in enumerate(steps):
        witness.record(worker, float(now), event, actions)
    return witness


OPEN = (m.Woke(), [tally(1, "a", "b"), pull("a"), pull("b")])
PUSHED = (m.Received("a", m.Push(0, 1, 0, 1, 1, 1, 1)), [fold("a")])


def test_a_sound_round_passes() -> None:
    witness = told(
        OPEN,
        PUSHED,
        (m.Folded(0, "a"), []),
        (m.Received("b", m.Nothing(0, 1)), [m.Merge(0, 1)]),
        (m.Merged(0, 1), []),
    )
    assert witness.merged == [(4.0, 0, 1, ("a",))]


@pytest.mark.parametrize(
    ("steps", "says"),
    [
        ([(m.Woke(), [tally(2, "a", "b")])], "tick 2 after 0"),
        ([(m.Woke(), [tally(1, "a")])], "closed with"),
        ([(m.Woke(), [tally(1, "a", "a")])], "closed with"),
        ([OPEN, (m.Merged(0, 2), [])], "skipped"),
        ([OPEN, (m.Woke(), [tally(2, "a", "b")])], "in flight"),
        ([OPEN, (m.Woke(), [pull("a", tick=0)])], "two rounds"),
        ([(m.Woke(), [pull("a", tick=4)])], "a pull of tick 4"),
        ([OPEN, (m.Woke(), [fold("c")])], "unasked"),
        ([OPEN, PUSHED, (m.Woke(), [fold("a")])], "twice"),
        ([OPEN, (m.Woke(), [fold("a", base=-5)])], "base -5 is not kept"),
        ([OPEN, (m.Woke(), [fold("a", weight=0.0)])], "weight 0"),
        ([OPEN, PUSHED, (m.Folded(0, "a"), [m.Merge(0, 1)])], "before everything was here"),
        ([(m.Woke(), [tally(1, "a", "b"), pull("a"), pull("b"), pull("c")])], "3 pushes under way"),
        ([(m.Woke(), [m.Wake(-1.0)])], "alarm"),
    ],
)
def test_a_syncers_sins_are_seen(steps: list[tuple[m.Event, list[m.Action]]], says: str) -> None:
    with pytest.raises(AssertionError, match=says):
        told(*steps)


@pytest.mark.parametrize(
    ("steps", "says"),
    [
        ([(m.StepCompleted(1, 1, 1.0), [])], "without a full model"),
        ([(m.Woke(), [m.Send(m.SYNCER, m.Progress(1, 1, 1.0))])], "before a full model"),
        ([(m.Woke(), [m.Hold()]), (m.Woke(), [m.Hold()])], "held twice"),
    ],
)
def test_a_learners_sins_are_seen(steps: list[tuple[m.Event, list[m.Action]]], says: str) -> None:
    with pytest.raises(AssertionError, match=says):
        told(*steps, worker="L-0")


def test_time_that_runs_backwards_is_seen() -> None:
    witness = Witness(OPTIONS)
    witness.record(m.SYNCER, 2.0, m.Woke(), [])
    with pytest.raises(AssertionError, match="backwards"):
        witness.record(m.SYNCER, 1.0, m.Woke(), [])
