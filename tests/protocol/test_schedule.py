"""Which fragment is due when."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from archipel.protocol.schedule import SyncOptions, due, due_between, offset, options_of


def options(fragments: int, interval: int) -> SyncOptions:
    return SyncOptions(fragments=fragments, interval_steps=interval)


def test_offsets_are_spread_and_rounded_down() -> None:
    assert [offset(p, options(3, 8)) for p in range(3)] == [0, 2, 5]


def test_one_fragment_a_tick_when_p_is_h() -> None:
    assert [due(tick, options(4, 4)) for tick in range(1, 9)] == [1, 2, 3, 0, 1, 2, 3, 0]


def test_one_fragment_every_h_ticks_when_p_is_one() -> None:
    assert [tick for tick in range(1, 100) if due(tick, options(1, 30)) is not None] == [30, 60, 90]


@given(st.integers(1, 60).flatmap(lambda h: st.tuples(st.integers(1, h), st.just(h))))
def test_every_fragment_is_due_once_a_cycle(shape: tuple[int, int]) -> None:
    fragments, interval = shape
    cycle = [due(tick, options(fragments, interval)) for tick in range(1, interval + 1)]
    assert sorted(p for p in cycle if p is not None) == list(range(fragments))


@given(st.integers(1, 40).flatmap(lambda h: st.tuples(st.integers(1, h), st.just(h))), st.integers(1, 500))
def test_due_agrees_with_offsets(shape: tuple[int, int], tick: int) -> None:
    sync = options(*shape)
    expected = [p for p in range(sync.fragments) if offset(p, sync) == tick % sync.interval_steps]
    assert due(tick, sync) == (expected[0] if expected else None)


def test_due_between_lists_each_once_in_order() -> None:
    assert due_between(3, 12, options(3, 8)) == (2, 0, 1)
    assert due_between(5, 4, options(3, 8)) == ()


def test_options_come_out_of_a_welcome() -> None:
    assert options_of({"sync": {"steps": 7}, "data": {}}) == SyncOptions(steps=7)
    with pytest.raises(Exception, match="stepz"):
        options_of({"sync": {"stepz": 7}})
