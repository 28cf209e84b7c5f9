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
    """`broken`: called with what is wrong; by default it raises AssertionError."""

    options: SyncOptions
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
    wakes: int = 0
    events: int = 0

    def record(self, worker: str, now: float, event: m.Event, actions: list[m.Action]) -> None:
        """Take in one record."""
        self.events += 1
        assert now >= self.now.get(worker, now), f"{worker}: time ran backwards"
        self.now[worker] = now
        for action in actions:
            if isinstance(action, m.Wake):
                self.wakes += 1
                assert action.at >= now, f"{worker}: alarm at {action.at} set at {now}"
            elif isinstance(action, m.Notice):
                self.notices.append((now, worker, action.text))
        if worker == m.SYNCER:
            self._syncer(now, event, actions)
        else:
            self._learner(self._view(worker, actions), event, actions)

    # ---- the syncer ----

    def _syncer(self, now: float, event: m.Event, actions: list[m.Action]) -> None:
        self.versions = self.versions or [0] * self.options.fragments
        match event:
            case m.Merged(fragment=fragment, version=version):
                assert version == self.versions[fragment] + 1, "a version was skipped"
                self.versions[fragment] = version
                self.merged.append((now, fragment, version, tuple(self.flying.pop(fragment))))
            case m.Rejected(fragment=fragment, worker=worker):
                self._over(worker, fragment)
            case m.Folded(fragment=fragment, worker=worker):
                self._over(worker, fragment)
                self.flying[fragment].append(worker)
            case m.Disconnected(worker=worker):
                self._forget(worker)
            case m.Received(sender=worker, message=m.Join()):
                self._forget(worker)
            case m.Received(sender=worker, message=m.Nothing() | m.Push() as answer):
                refused = not any(isinstance(action, m.Fold) for action in actions)
                if refused and self.asked.get((worker, answer.fragment)) == answer.tick:
                    self.asked.pop((worker, answer.fragment))
        for action in actions:
            if isinstance(action, m.Send) and isinstance(action.message, m.Welcome):
                self._welcomed(action.message)
            self._decided(now, action)
        assert len(self.asked) <= self.options.pulls_max, f"{len(self.asked)} pushes under way"

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
            case m.Tally(tick=tick, workers=workers):
                last = self.tick == self.options.steps == tick
                assert tick == self.tick + 1 or last, f"tick {tick} after {self.tick}"
                room = max(self.options.overlap_steps, 1) - len(self.flying)
                assert room > 0, f"tick {tick} closed with rounds of {sorted(self.flying)} in flight"
                need = 1 if self.options.quorum_live else self.options.quorum
                assert len(set(workers)) == len(workers) >= need, f"tick {tick} closed with {workers}"
                self.tick = tick
                self.ticks.append((now, action))
            case m.Send(to=worker, message=m.Pull(fragment=fragment, tick=tick, version=version)):
                assert version == self.versions[fragment], f"{worker} is asked for version {version}"
                assert tick <= self.tick, f"a pull of tick {tick} at {self.tick}"
                same = fragment not in self.flying or self.began[fragment] == tick
                assert same, f"two rounds of fragment {fragment}"
                self.flying.setdefault(fragment, [])
                self.began[fragment] = tick
                self.asked[worker, fragment] = tick
            case m.Fold(fragment=fragment, worker=worker, base=base, full=full, weight=weight):
                key = (worker, fragment)
                assert key in self.asked and key not in self.folding, f"{worker}: folded unasked, or twice"
                kept = self.versions[fragment] - BASES_KEPT < base <= self.versions[fragment]
                assert full or kept, f"base {base} is not kept: {self.versions[fragment]}"
                assert weight > 0, f"{worker}: weight {weight}"
                self.folding.add(key)
            case m.Merge(fragment=fragment):
                assert self.flying[fragment], "a merge of nothing"
                assert not any(key[1] == fragment for key in self.asked), "merged before everything was here"
            case m.Discard(fragment=fragment):
                self.flying.pop(fragment, None)
            case m.Notice(text=text) if text.startswith("pull overdue"):
                words = dict(word.split("=") for word in text.split()[2:])
                self.asked.pop((words["worker"], int(words["fragment"])), None)
            case m.Notice(text=text) if text.startswith("gone"):
                self._forget(text.split()[1].removeprefix("worker="))

    # ---- a learner ----

    def _view(self, worker: str, actions: list[m.Action]) -> LearnerView:
        view = self.learners.setdefault(worker, LearnerView())
        for action in actions:
            join = action.message if isinstance(action, m.Send) else None
            if isinstance(join, m.Join) and join.incarnation != view.incarnation:
                view = self.learners[worker] = LearnerView(incarnation=join.incarnation)
        return view

    def _learner(self, view: LearnerView, event: m.Event, actions: list[m.Action]) -> None:
        match event:
            case m.Received(message=m.Welcome(versions=versions)):
                view.needed = len(versions)
            case m.Applied(fragment=fragment):
                view.held.add(fragment)
            case m.StepCompleted(step=step):
                assert view.needed >= 0 and len(view.held) == view.needed, "a step without a full model"
                assert step == view.step + 1, f"step {step} after {view.step}"
                view.step = step
        for action in actions:
            match action:
                case m.Send(message=m.Progress()):
                    assert len(view.held) == view.needed, "a report before a full model"
                case m.Send(message=m.Push(steps=steps, tokens=tokens)):
                    assert steps > 0 and tokens > 0, f"a push of {steps} steps, {tokens} tokens"
                case m.Hold():
                    assert not view.holding, "held twice"
                    view.holding = True
                case m.Resume():
                    view.holding = False

    # ---- what tests ask ----

    def due_ticks(self) -> int:
        """Return how many of the ticks closed so far had a fragment due."""
        return sum(due(tally.tick, self.options) is not None for _, tally in self.ticks)
