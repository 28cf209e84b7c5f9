"""All tapes in one order: causes before effects, whatever the clocks say."""

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from archipel.errors import TapeError
from archipel.protocol.messages import Done, Heartbeat, Progress, Received, Send, StepCompleted, Woke
from archipel.tape.order import merge
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
