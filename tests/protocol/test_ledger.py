"""Every token has one fate. First by hand, then against a learner that is tracked token by token."""

import random
from dataclasses import dataclass, field

import pytest

from archipel.protocol.ledger import Ledger, Stretch


@pytest.fixture
def ledger() -> Ledger:
    made = Ledger(1)
    made.begin("L", "a")
    return made


def fates(ledger: Ledger) -> dict[str, int]:
    return {fate: tokens for fate, tokens in ledger.fates("L").items() if tokens}


def test_a_round_merges_what_was_pushed_and_overwrites_the_rest(ledger: Ledger) -> None:
    ledger.reported("L", 100)
    ledger.accepted("L", 0, Stretch("a", 0, 80), version=1)
    assert ledger.landed("L", 0, 100, version=1)
    assert fates(ledger) == {"consumed": 100, "merged": 80, "overwritten": 20}


def test_an_update_of_somebody_elses_round_leaves_the_learner_absent(ledger: Ledger) -> None:
    ledger.reported("L", 100)
    ledger.landed("L", 0, 100, version=1)
    assert fates(ledger) == {"consumed": 100, "absent": 100}


def test_what_no_update_reached_is_unmerged(ledger: Ledger) -> None:
    ledger.left("L", 100, [100])
    assert fates(ledger) == {"consumed": 100, "unmerged": 100}
    assert ledger.closes()


def test_a_dead_learner_loses_what_was_not_pushed(ledger: Ledger) -> None:
    ledger.reported("L", 100)
    ledger.accepted("L", 0, Stretch("a", 0, 70), version=1)
    ledger.lose("L")
    assert fates(ledger) == {"consumed": 100, "merged": 70, "lost": 30}
    assert ledger.table()["tail_unknown"] == {"L": 1}


def test_the_data_position_reveals_the_tail(ledger: Ledger) -> None:
    ledger.reported("L", 100)
    ledger.begin("L", "b")
    ledger.tail("L", 25)
    assert fates(ledger) == {"consumed": 125, "lost": 125}
    assert ledger.table()["tail_unknown"] == {}


def test_a_landing_that_overtakes_the_push_is_put_right(ledger: Ledger) -> None:
    ledger.reported("L", 100)
    ledger.landed("L", 0, 100, version=1)
    assert ledger.admits("L", 0, Stretch("a", 0, 60))
    ledger.accepted("L", 0, Stretch("a", 0, 60), version=2)
    assert fates(ledger) == {"consumed": 100, "merged": 60, "absent": 40}


@pytest.mark.parametrize("stretch", [(0, 60), (50, 80), (0, 100)])
def test_no_token_is_merged_twice(ledger: Ledger, stretch: tuple[int, int]) -> None:
    ledger.reported("L", 100)
    ledger.accepted("L", 0, Stretch("a", 0, 60), version=1)
    assert not ledger.admits("L", 0, Stretch("a", *stretch))
    ledger.landed("L", 0, 100, version=1)
    assert not ledger.admits("L", 0, Stretch("a", *stretch))


def test_a_rejected_push_gives_its_tokens_back(ledger: Ledger) -> None:
    ledger.reported("L", 100)
    ledger.accepted("L", 0, Stretch("a", 0, 100), version=1)
    ledger.returned("L", 0, Stretch("a", 0, 100))
    assert fates(ledger) == {"consumed": 100, "unmerged": 100}


def test_a_push_rejected_after_its_learner_came_back_anew_is_lost(ledger: Ledger) -> None:
    ledger.reported("L", 100)
    ledger.accepted("L", 0, Stretch("a", 0, 100), version=1)
    ledger.begin("L", "b")
    ledger.returned("L", 0, Stretch("a", 0, 100))
    assert fates(ledger) == {"consumed": 100, "lost": 100}


def test_landings_missed_while_away_are_made_good(ledger: Ledger) -> None:
    ledger.reported("L", 100)
    ledger.accepted("L", 0, Stretch("a", 0, 90), version=3)
    ledger.resumed("L", 140, [10], [3])
    assert fates(ledger) == {"consumed": 140, "merged": 90, "overwritten": 40, "unmerged": 10}


@pytest.mark.parametrize("total", [-1, 101, 50])
def test_impossible_landings_change_nothing(ledger: Ledger, total: int) -> None:
    ledger.reported("L", 100)
    ledger.accepted("L", 0, Stretch("a", 0, 80), version=1)
    before = fates(ledger)
    assert not ledger.landed("L", 0, total, version=1)
    assert fates(ledger) == before


def test_at_the_end_the_absent_lose_and_the_present_keep() -> None:
    ledger = Ledger(1)
    for name in ("here", "gone"):
        ledger.begin(name, "a")
        ledger.reported(name, 10)
    ledger.end(present={"here"})
    assert ledger.fates("here")["unmerged"] == 10
    assert ledger.fates("gone")["lost"] == 10
    assert ledger.closes()


# ---- against a learner tracked token by token ----


@dataclass
class Tracked:
    """One learner and fragment: the fate of each token by name, worked out the slow way."""

    rng: random.Random
    ledger: Ledger = field(default_factory=lambda: Ledger(1))
    incarnation: int = 0
    base: list[str] = field(default_factory=list)  # fate of each token of this incarnation, "" while open
    closed: list[str] = field(default_factory=list)
    since: int = 0  # where the last landing was
    version: int = 0
    copy: tuple[int, int] | None = None
    push: tuple[int, int] | None = None  # asked for, on its way
    round: tuple[int, int] | None = None  # accepted, not merged
    pending: tuple[int, bool] | None = None  # update on its way: version, was it part of the round
    away: bool = False

    def begin(self) -> None:
        self.incarnation += 1
        self.ledger.begin("L", str(self.incarnation))
        self.base, self.since, self.copy, self.push, self.pending = [], 0, None, None, None
        self.away = False

    def step(self) -> None:
        self.base += [""] * self.rng.randint(1, 5)
        self.copy = (self.since, len(self.base))
        if not self.away:
            self.ledger.reported("L", len(self.base))

    def ask(self) -> None:
        if self.copy and not self.push and not self.round and not self.pending and not self.away:
            self.push = self.copy

    def accept(self) -> None:
        if not self.push or self.away:
            return
        stretch = Stretch(str(self.incarnation), *self.push)
        assert self.ledger.admits("L", 0, stretch)
        self.ledger.accepted("L", 0, stretch, self.version + 1)
        self.base[slice(*self.push)] = ["merged"] * (self.push[1] - self.push[0])
        self.round, self.push = self.push, None

    def merge(self) -> None:
        """A round ends: with this learner's push, or without it."""
        if self.pending is None:
            self.version += 1
            self.pending, self.round = (self.version, self.round is not None), None

    def fail(self) -> None:
        if self.round:
            self.ledger.returned("L", 0, Stretch(str(self.incarnation), *self.round))
            for token in range(*self.round):
                self.base[token] = "" if token >= self.since else "absent"
            self.round = None

    def land(self) -> None:
        if self.pending is None or self.away:
            return
        version, mine = self.pending
        for token in range(self.since, len(self.base)):
            self.base[token] = self.base[token] or ("overwritten" if mine else "absent")
        self.since, self.copy, self.pending = len(self.base), None, None
        assert self.ledger.landed("L", 0, self.since, version)

    def leave_for_a_while(self) -> None:
        self.away, self.push = True, None

    def come_back(self) -> None:
        if self.away:
            self.away = False
            self.ledger.resumed("L", len(self.base), [len(self.base) - self.since], [self.version])

    def die(self) -> None:
        self.round = None  # what was accepted is merged all the same
        unseen = len(self.base) - self.ledger.accounts["L"].current
        self.closed += [fate or "lost" for fate in self.base]
        self.begin()
        self.ledger.tail("L", unseen)

    def end(self) -> None:
        self.come_back()
        self.ledger.left("L", len(self.base), [len(self.base) - self.since])
        self.closed += [fate or "unmerged" for fate in self.base]


@pytest.mark.parametrize("seed", range(300))
def test_random_lives_close_token_by_token(seed: int) -> None:
    tracked = Tracked(random.Random(seed))
    tracked.begin()
    acts = [tracked.step, tracked.step, tracked.ask, tracked.accept, tracked.merge, tracked.fail]
    acts += [tracked.land, tracked.leave_for_a_while, tracked.come_back, tracked.come_back]
    for _ in range(80):
        tracked.rng.choice(acts)()
        if tracked.rng.random() < 0.03:
            tracked.die()
        assert tracked.ledger.closes(), f"seed {seed}"
    tracked.end()
    table = tracked.ledger.table()
    counted = {
        fate: tracked.closed.count(fate) for fate in ("merged", "overwritten", "absent", "lost", "unmerged")
    }
    assert {fate: table[fate] for fate in counted} == counted, f"seed {seed}"
    assert table["consumed"] == len(tracked.closed)
