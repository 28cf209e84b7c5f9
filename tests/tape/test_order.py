"""All tapes in one order: causes before effects, whatever the clocks say."""

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from archipel.errors import TapeError
from archipel.protocol.messages import (
    Done,
    Heartbeat,
    Progress,
    Received,
    Send,
    StepCompleted,
    Tally,
    TickClosed,
    Update,
    Woke,
)
from archipel.tape.order import merge, ordered
from archipel.tape.tape import Header, TapeWriter, tape_path


def tape(folder: Path, worker: str, records: list[Any], incarnation: str = "a", started: float = 0.0) -> None:
    header = Header("run", worker, "learner", incarnation, started)
    writer = TapeWriter(tape_path(folder, worker, incarnation), header)
    for record in records:
        writer.write(*record)
    writer.close()


def order(folder: Path) -> list[tuple[str, int]]:
    return [(worker, record.i) for worker, record in merge(folder)]


def test_a_receipt_follows_its_send_though_its_clock_is_behind(tmp_path: Path) -> None:
    said = Progress(1, 64, 0.1)
    tape(tmp_path, "learner", [(1000.0, StepCompleted(1, 64, 0.1), [Send("syncer", said)])])
    tape(tmp_path, "syncer", [(1.0, Woke(), []), (2.0, Received("learner", said), [])])
    assert order(tmp_path) == [("syncer", 0), ("learner", 0), ("syncer", 1)]


def test_ties_go_by_time_then_by_worker_name(tmp_path: Path) -> None:
    for worker in ("b", "a", "c"):
        tape(tmp_path, worker, [(1.0, Woke(), []), (2.0 if worker == "a" else 1.5, Woke(), [])])
    assert order(tmp_path) == [("a", 0), ("b", 0), ("c", 0), ("b", 1), ("c", 1), ("a", 1)]


def test_equal_messages_match_in_order_and_lost_ones_are_skipped(tmp_path: Path) -> None:
    beat, mark = Send("s", Heartbeat()), Send("s", Progress(1, 1, 0.1))
    tape(tmp_path, "l", [(t, Woke(), [a]) for t, a in [(10.0, beat), (11.0, mark), (12.0, beat)]])
    # The first heartbeat was lost: the one received after the mark is the second.
    tape(tmp_path, "s", [(0.0, Received("l", mark.message), []), (0.1, Received("l", beat.message), [])])
    assert order(tmp_path) == [("l", 0), ("l", 1), ("s", 0), ("l", 2), ("s", 1)]


def test_a_clock_component_follows_the_record_that_reached_it(tmp_path: Path) -> None:
    tape(tmp_path, "l", [(10.0, Woke(), [], {"l": 1}), (11.0, Woke(), [], {"l": 2})])
    tape(tmp_path, "s", [(0.0, Woke(), [], {"s": 1}), (0.1, Woke(), [], {"l": 2})])
    assert order(tmp_path) == [("s", 0), ("l", 0), ("l", 1), ("s", 1)]


def test_steps_and_ticks_are_the_component_of_a_host_that_counts_them(tmp_path: Path) -> None:
    """A live host writes what it heard of others; what it reached itself is in the event and the actions."""
    tally = Tally(4, ("l",), 0.1, 0.0, 0.0, 0.0, 0.0)
    tape(tmp_path, "l", [(10.0, StepCompleted(7, 64, 0.1), []), (11.0, Woke(), [], {"s": 4})])
    tape(tmp_path, "s", [(0.0, Woke(), [], {"l": 7}), (20.0, Woke(), [tally])])
    assert order(tmp_path) == [("l", 0), ("s", 0), ("s", 1), ("l", 1)]


def test_payloads_may_be_overtaken_by_small_messages_and_by_each_other(tmp_path: Path) -> None:
    sent = [Update(0, 1, 3), Update(1, 1, 4), TickClosed(4), Update(0, 2, 5)]
    received = [sent[2], sent[1], sent[0], sent[3]]
    tape(
        tmp_path,
        "l",
        [(float(number), Received("s", message), []) for number, message in enumerate(received)],
    )
    tape(
        tmp_path, "s", [(10.0 + number, Woke(), [Send("l", message)]) for number, message in enumerate(sent)]
    )
    # Each receipt comes as soon as its own send has: none waits for the end of the sender's tape.
    places = ["s", "s", "s", "l", "l", "l", "s", "l"]
    assert [worker for worker, _ in order(tmp_path)] == places


def test_a_syncer_that_was_started_again_comes_after_its_former_self(tmp_path: Path) -> None:
    said = Progress(1, 64, 0.1)
    tape(tmp_path, "syncer", [(0.0, Received("l", said), []), (0.1, Woke(), [])], "b", started=1.0)
    tape(tmp_path, "syncer", [(0.2, Woke(), [])], "a", started=2.0)
    tape(tmp_path, "l", [(5.0, Woke(), [Send("syncer", said)])])
    found = [(item.worker, item.incarnation, item.last) for item in ordered(tmp_path)]
    assert found == [("l", "a", True), ("syncer", "b", False), ("syncer", "b", True), ("syncer", "a", True)]


def test_messages_no_tape_sent_wait_for_their_sender_and_no_longer(tmp_path: Path) -> None:
    tape(tmp_path, "l", [(5.0, Woke(), [])])
    tape(tmp_path, "s", [(0.0, Received("gone", Done(3)), []), (1.0, Received("l", Heartbeat()), [])])
    assert order(tmp_path) == [("s", 0), ("l", 0), ("s", 1)]


def test_a_restarted_worker_is_matched_over_both_its_tapes(tmp_path: Path) -> None:
    old, new = Progress(9, 9, 0.1), Progress(1, 1, 0.1)
    tape(tmp_path, "l", [(100.0, Woke(), [Send("s", old)])], "x", started=1.0)
    tape(tmp_path, "l", [(50.0, Woke(), [Send("s", new)])], "b", started=2.0)
    tape(tmp_path, "s", [(0.0, Received("l", old), []), (0.1, Received("l", new), [])])
    assert order(tmp_path).index(("s", 0)) > 0
    assert [r.event.message for w, r in merge(tmp_path) if w == "s"] == [old, new]


def test_tapes_that_contradict_each_other_are_refused(tmp_path: Path) -> None:
    ping, pong = Progress(1, 1, 0.1), Progress(2, 2, 0.1)
    tape(tmp_path, "a", [(0.0, Received("b", pong), []), (1.0, Woke(), [Send("b", ping)])])
    tape(tmp_path, "b", [(0.0, Received("a", ping), []), (1.0, Woke(), [Send("a", pong)])])
    with pytest.raises(TapeError, match="not of one run"):
        order(tmp_path)


@given(data=st.data())
@settings(max_examples=60, deadline=None)
def test_any_exchange_under_any_clocks_keeps_causes_first(tmp_path_factory: Any, data: Any) -> None:
    """Three workers, FIFO channels that lose messages, arbitrary clocks."""
    names = ["a", "b", "s"]
    channels: dict[Any, list[Any]] = {(x, y): [] for x in names for y in names if x != y}
    records: dict[str, list[Any]] = {name: [] for name in names}
    causes: dict[tuple[str, int], tuple[str, int]] = {}
    clock = dict.fromkeys(names, 0.0)
    for number in range(data.draw(st.integers(5, 40))):
        x, y = data.draw(st.sampled_from(sorted(channels)))
        me, act = data.draw(st.sampled_from([(x, "send"), (y, "take"), (x, "lose")]))
        clock[me] += data.draw(st.floats(0, 100))
        if act == "send":
            message = data.draw(st.sampled_from([Heartbeat(), Progress(number, 1, 0.1)]))
            channels[x, y].append((message, len(records[me])))
            records[me].append((clock[me], Woke(), [Send(y, message)]))
        elif act == "take" and channels[x, y]:
            message, sent = channels[x, y].pop(0)
            if not isinstance(message, Heartbeat):
                causes[me, len(records[me])] = (x, sent)
            records[me].append((clock[me], Received(x, message), []))
        elif act == "lose" and channels[x, y]:
            channels[x, y].pop(0)
    folder = tmp_path_factory.mktemp("run")
    for name in names:
        tape(folder, name, records[name])
    merged = order(folder)
    place = {who: n for n, who in enumerate(merged)}
    assert len(place) == sum(map(len, records.values()))
    assert all(place[name, i] < place[name, i + 1] for name in names for i in range(len(records[name]) - 1))
    assert all(place[cause] < place[effect] for effect, cause in causes.items())
    assert merged == order(folder)
