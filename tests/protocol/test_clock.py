"""Sparse vector clocks."""

from hypothesis import given
from hypothesis import strategies as st

from archipel.protocol.clock import VectorClock, happened_before


def test_components_only_grow() -> None:
    clock = VectorClock("L0")
    clock.advance(5)
    clock.advance(3)
    assert clock.observe({"syncer": 2, "L0": 4}) == {"syncer": 2}
    assert clock.steps == {"L0": 5, "syncer": 2}


def test_a_message_carries_what_changed() -> None:
    clock = VectorClock("L0")
    clock.advance(1)
    assert clock.delta("syncer") == {"L0": 1}
    assert clock.delta("syncer") == {}
    clock.advance(2)
    clock.observe({"syncer": 9})
    assert clock.delta("syncer") == {"L0": 2, "syncer": 9}


def test_other_learners_are_not_passed_on() -> None:
    clock = VectorClock("syncer")
    clock.observe({"L0": 4, "L1": 5})
    assert clock.delta("L0") == {"L0": 4}


def test_a_new_channel_is_told_everything_again() -> None:
    clock = VectorClock("L0")
    clock.advance(1)
    clock.delta("syncer")
    clock.forget("syncer")
    assert clock.delta("syncer") == {"L0": 1}


@given(st.lists(st.sampled_from(["a step", "b step", "a to b", "b to a"]), max_size=60))
def test_receivers_know_all_that_senders_knew_of_the_two(script: list[str]) -> None:
    clocks = {name: VectorClock(name) for name in "ab"}
    steps = dict.fromkeys("ab", 0)
    for line in script:
        match line.split():
            case [name, "step"]:
                steps[name] += 1
                clocks[name].advance(steps[name])
            case [sender, "to", receiver]:
                clocks[receiver].observe(clocks[sender].delta(receiver))
                assert clocks[receiver].steps.get(sender, 0) == steps[sender]


def test_happened_before_is_a_partial_order() -> None:
    early, late, other = {"a": 1}, {"a": 2, "b": 1}, {"a": 0, "b": 5}
    assert happened_before(early, late)
    assert not happened_before(late, early)
    assert not happened_before(early, other) and not happened_before(other, early)
    assert not happened_before(early, early)
