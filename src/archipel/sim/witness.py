"""Watches a run and fails at the first thing that must never happen, whatever the faults.

Give `Witness(options).record` to a host's `on_record`. It knows only what machines were told and decided, so
it holds for a virtual run, a live one and a tape alike.

Checked: time never runs backwards; ticks and versions grow one by one; a tick counts a quorum of distinct
learners; one round per fragment, and a tick closes only while the overlap has room for its round; what is
folded was asked for, once; no more pushes under way than allowed; no report before a full model; an alarm is
never set into the past.
"""

from dataclasses import dataclass, field

from ..protocol import messages as m
from ..protocol.rounds import BASES_KEPT
from ..protocol.schedule import SyncOptions, due


@dataclass
class LearnerView:
    """What one learner's records showed."""

    held: set[int] = field(default_factory=set)
    needed: int = -1  # fragments of the model; -1: no welcome yet
    incarnation: str = ""
    step: int = 0
    holding: bool = False


@dataclass
class Witness:
    """Raises AssertionError at what must not happen. `remember`: keep every tick, round and notice for those
    who ask later; without it memory does not grow with time."""

    options: SyncOptions
    remember: bool = True
    now: dict[str, float] = field(default_factory=dict)
    epoch: int = 1
    tick: int = 0
    ticks: list[tuple[float, m.Tally]] = field(default_factory=list)
    merged: list[tuple[float, int, int, tuple[str, ...]]] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    flying: dict[int, list[str]] = field(default_factory=dict)  # fragment -> folded so far
    began: dict[int, int] = field(default_factory=dict)  # fragment -> tick of its newest round
    asked: dict[tuple[str, int], int] = field(default_factory=dict)  # (worker, fragment) -> tick of the pull
    folding: set[tuple[str, int]] = field(default_factory=set)  # of those, whose bytes are here
    learners: dict[str, LearnerView] = field(default_factory=dict)
    notices: list[tuple[float, str, str]] = field(default_factory=list)
    rounds: int = 0
    folded: int = 0  # pushes in those rounds
    wakes: int = 0
    events: int = 0

    def record(self, worker: str, now: float, event: m.Event, actions: list[m.Action]) -> None:
        """Take in one record."""
        self.events += 1
        assert now >= self.now.get(worker, now), f"{worker}: time ran backwards"
        self.now[worker] = now
        if worker == m.SYNCER:
            self._syncer(now, event, actions)
        else:
            self._learner(worker, now, event, actions)

    def _common(self, worker: str, now: float, action: m.Action) -> None:
        """Look at what both kinds of workers decide."""
        if type(action) is m.Wake:
            self.wakes += 1
            assert action.at >= now, f"{worker}: alarm at {action.at} set at {now}"
        elif type(action) is m.Notice and self.remember:
            self.notices.append((now, worker, action.text))

    # ---- the syncer ----

    def _syncer(self, now: float, event: m.Event, actions: list[m.Action]) -> None:
        if not self.versions:
            self.versions = [0] * self.options.fragments
        match event:
            case m.Received(sender=worker, message=message):
                self._heard(worker, message, actions)
            case m.Folded(fragment=fragment, worker=worker):
                self._over(worker, fragment)
                self.flying[fragment].append(worker)
            case m.Merged(fragment=fragment, version=version):
                self._merged(now, fragment, version)
            case m.Rejected(fragment=fragment, worker=worker):
                self._over(worker, fragment)
            case m.Disconnected(worker=worker):
                self._forget(worker)
        for action in actions:
            self._decided(now, action)
        assert len(self.asked) <= self.options.pulls_max, f"{len(self.asked)} pushes under way"

    def _heard(self, worker: str, message: m.AnyMessage, actions: list[m.Action]) -> None:
        kind = type(message)
        if kind is m.Push or kind is m.Nothing:
            assert isinstance(message, m.Push | m.Nothing)
            refused = not any(type(action) is m.Fold for action in actions)
            if refused and self.asked.get((worker, message.fragment)) == message.tick:
                del self.asked[worker, message.fragment]
        elif kind is m.Join:
            self._forget(worker)

    def _merged(self, now: float, fragment: int, version: int) -> None:
        assert version == self.versions[fragment] + 1, "a version was skipped"
        self.versions[fragment] = version
        workers = self.flying.pop(fragment)
        self.rounds += 1
        self.folded += len(workers)
        if self.remember:
            self.merged.append((now, fragment, version, tuple(workers)))

    def _welcomed(self, welcome: m.Welcome) -> None:
        """A syncer that came back says where it begins again."""
        if welcome.epoch == self.epoch and welcome.tick >= self.tick:
            assert list(welcome.versions) == self.versions, "a welcome with other versions"
            return
        assert welcome.epoch > self.epoch or welcome.tick == 0, "an epoch went back"
        self.epoch, self.tick, self.versions = welcome.epoch, welcome.tick, list(welcome.versions)
        self.flying.clear()
        self.asked.clear()
        self.folding.clear()

    def _over(self, worker: str, fragment: int) -> None:
        del self.asked[worker, fragment]
        self.folding.discard((worker, fragment))

    def _forget(self, worker: str) -> None:
        # Bytes that are here already are folded all the same: only a pull is void.
        for key in [key for key in self.asked if key[0] == worker and key not in self.folding]:
            del self.asked[key]

    def _decided(self, now: float, action: m.Action) -> None:
        match action:
            case m.Send(to=worker, message=message):
                if type(message) is m.Pull:
                    self._pulled(worker, message)
                elif type(message) is m.Welcome:
                    self._welcomed(message)
            case m.Fold():
                self._folding(action)
            case m.Tally():
                self._tallied(now, action)
            case m.Merge(fragment=fragment):
                assert self.flying[fragment], "a merge of nothing"
                assert not any(key[1] == fragment for key in self.asked), "merged before everything was here"
            case m.Discard(fragment=fragment):
                self.flying.pop(fragment, None)
            case m.Notice(text=text):
                self._common(m.SYNCER, now, action)
                self._noticed(text)
            case _:
                self._common(m.SYNCER, now, action)

    def _tallied(self, now: float, tally: m.Tally) -> None:
        tick, workers = tally.tick, tally.workers
        last = self.tick == self.options.steps == tick
        assert tick == self.tick + 1 or last, f"tick {tick} after {self.tick}"
        room = max(self.options.overlap_steps, 1) - len(self.flying)
        assert room > 0, f"tick {tick} closed with rounds of {sorted(self.flying)} in flight"
        need = 1 if self.options.quorum_live else self.options.quorum
        assert len(set(workers)) == len(workers) >= need, f"tick {tick} closed with {workers}"
        self.tick = tick
        if self.remember:
            self.ticks.append((now, tally))

    def _pulled(self, worker: str, pull: m.Pull) -> None:
        fragment, tick, version = pull.fragment, pull.tick, pull.version
        assert version == self.versions[fragment], f"{worker} is asked for version {version}"
        assert tick <= self.tick, f"a pull of tick {tick} at {self.tick}"
        same = fragment not in self.flying or self.began[fragment] == tick
        assert same, f"two rounds of fragment {fragment}"
        self.flying.setdefault(fragment, [])
        self.began[fragment] = tick
        self.asked[worker, fragment] = tick

    def _folding(self, fold: m.Fold) -> None:
        key = (fold.worker, fold.fragment)
        assert key in self.asked and key not in self.folding, f"{fold.worker}: folded unasked, or twice"
        version = self.versions[fold.fragment]
        kept = version - BASES_KEPT < fold.base <= version
        assert fold.full or kept, f"base {fold.base} is not kept: {version}"
        assert fold.weight > 0, f"{fold.worker}: weight {fold.weight}"
        self.folding.add(key)

    def _noticed(self, text: str) -> None:
        if text.startswith("pull overdue"):
            words = dict(word.split("=") for word in text.split()[2:])
            self.asked.pop((words["worker"], int(words["fragment"])), None)
        elif text.startswith("gone"):
            self._forget(text.split()[1].removeprefix("worker="))

    # ---- a learner ----

    def _learner(self, worker: str, now: float, event: m.Event, actions: list[m.Action]) -> None:
        view = self.learners.get(worker)
        if view is None:
            view = self.learners[worker] = LearnerView()
        kind = type(event)
        if kind is m.StepCompleted:
            assert isinstance(event, m.StepCompleted)
            assert len(view.held) == view.needed >= 0, "a step without a full model"
            assert event.step == view.step + 1, f"step {event.step} after {view.step}"
            view.step = event.step
        elif kind is m.Applied:
            assert isinstance(event, m.Applied)
            view.held.add(event.fragment)
        elif kind is m.Received:
            assert isinstance(event, m.Received)
            if type(event.message) is m.Welcome:
                view.needed = len(event.message.versions)
        for action in actions:
            match action:
                case m.Copy() | m.Apply():
                    pass
                case m.Send(message=message):
                    view = self._said(worker, view, message)
                case m.Hold():
                    assert not view.holding, "held twice"
                    view.holding = True
                case m.Resume():
                    view.holding = False
                case _:
                    self._common(worker, now, action)

    def _said(self, worker: str, view: LearnerView, message: m.AnyMessage) -> LearnerView:
        """Look at what a learner sends; return its view, a new one where it is another process."""
        match message:
            case m.Progress():
                assert len(view.held) == view.needed, "a report before a full model"
            case m.Push(steps=steps, tokens=tokens):
                assert steps > 0 and tokens > 0, f"a push of {steps} steps, {tokens} tokens"
            case m.Join(incarnation=incarnation) if incarnation != view.incarnation:
                view = self.learners[worker] = LearnerView(incarnation=incarnation)
        return view

    # ---- what tests ask ----

    def due_ticks(self) -> int:
        """Return how many of the ticks closed so far had a fragment due."""
        return sum(due(tally.tick, self.options) is not None for _, tally in self.ticks)
