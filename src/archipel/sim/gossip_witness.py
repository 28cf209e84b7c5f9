"""Watches a gossip run and fails at the first thing that must never happen, whatever the faults.

Give `GossipWitness().record` to a host's `on_record`. It knows only what machines were told and decided.

Checked: time never runs backwards; no alarm in the past; a process settles rounds in growing order, each
once, and takes no step between its offer and its mix; a model is mixed in, or applied late, once, and only
if both sides said `Meet` for that round with the same run, epoch, view, model and form; weights are positive
and leave something for the peer itself; epochs of a rendezvous grow and its views are sorted; a mean is made
of the members its attempt names, and all that accept a mean accept the same one.
"""

from dataclasses import dataclass, field

from ..protocol import gossip as g
from ..protocol import messages as m

Key = tuple[str, str, int]  # who says it, to whom, in which round


@dataclass
class PeerView:
    """What one process's records showed."""

    incarnation: str = ""
    step: int = 0
    settled: int = -1  # newest round mixed
    offered: int = -1  # round whose offer is made or asked for, and not mixed
    used: set[tuple[int, str]] = field(default_factory=set)  # (round, worker) mixed in or applied late


@dataclass
class GossipWitness:
    """`mixed`: (time, worker, round, workers) of every settled round, in order."""

    now: dict[str, float] = field(default_factory=dict)
    peers: dict[str, PeerView] = field(default_factory=dict)
    meets: dict[Key, list[g.Meet]] = field(default_factory=dict)
    mixed: list[tuple[float, str, int, tuple[str, ...]]] = field(default_factory=list)
    late: list[tuple[float, str, int, str]] = field(default_factory=list)
    local_steps: list[tuple[float, str, int, int]] = field(default_factory=list)  # time, worker, round, H_i
    notices: list[tuple[float, str, str]] = field(default_factory=list)
    epoch: int = 0
    members: dict[int, tuple[str, ...]] = field(default_factory=dict)  # attempt at the mean -> of whom
    accepted: dict[str, str] = field(default_factory=dict)  # worker -> digest of the mean
    concluded: g.Concluded | None = None
    events: int = 0

    def record(self, worker: str, now: float, event: m.Event, actions: list[m.Action]) -> None:
        """Take in one record."""
        self.events += 1
        assert now >= self.now.get(worker, now), f"{worker}: time ran backwards"
        self.now[worker] = now
        for action in actions:
            if isinstance(action, m.Wake):
                assert action.at >= now, f"{worker}: alarm at {action.at} set at {now}"
            elif isinstance(action, m.Notice):
                self.notices.append((now, worker, action.text))
        if worker == g.RENDEZVOUS:
            self._rendezvous(event, actions)
            return
        self._told(worker, event)
        for action in actions:
            self._decided(worker, now, action)

    # ---- the rendezvous ----

    def _rendezvous(self, event: m.Event, actions: list[m.Action]) -> None:
        for action in actions:
            match action:
                case m.Send(message=g.View(epoch=epoch, members=members)):
                    names = [member.name for member in members]
                    assert names == sorted(set(names)), f"a view of {names}"
                    self.epoch = epoch
                case m.Send(message=g.Conclude(attempt=attempt, members=named)):
                    self.members[attempt] = named
        if isinstance(event, m.Received) and isinstance(event.message, g.Concluded):
            self.concluded = event.message

    # ---- a peer ----

    def _told(self, worker: str, event: m.Event) -> None:
        view = self.peers.setdefault(worker, PeerView())
        match event:
            case m.StepCompleted(step=step):
                assert step == view.step + 1, f"{worker}: step {step} after {view.step}"
                assert view.offered < 0, f"{worker}: a step between offer and mix of round {view.offered}"
                view.step = step
            case g.Mixed(round=number):
                assert number == view.settled, f"{worker}: mixed {number}, asked for {view.settled}"
            case g.Adopted(round=number, reason=""):
                view.settled = max(view.settled, number - 1)

    def _decided(self, worker: str, now: float, action: m.Action) -> None:
        view = self.peers[worker]
        match action:
            case m.Send(message=g.Enrol(incarnation=incarnation)) if incarnation != view.incarnation:
                self.peers[worker] = PeerView(incarnation)
            case m.Send(to=to, message=g.Meet() as meet):
                self.meets.setdefault((worker, to, meet.round), []).append(meet)
            case m.Send(message=g.Report(round=number, local_steps=steps, fate=fate)) if fate != "late":
                self.local_steps.append((now, worker, number, steps))
            case g.Offer(round=number):
                assert number > view.settled and view.offered < 0, f"{worker}: offers {number} again"
                view.offered = number
            case g.Mix(round=number, workers=workers, weights=weights):
                assert number == view.offered, f"{worker}: mixes {number}, offered {view.offered}"
                assert all(weight > 0 for weight in weights) and sum(weights) < 1, f"{worker}: {weights}"
                for other in workers:
                    self._used(worker, other, number)
                view.offered, view.settled = -1, number
                self.mixed.append((now, worker, number, workers))
            case g.Correct(round=number, worker=other, weight=weight, rounds=rounds):
                assert number <= view.settled and rounds >= 0 and 0 < weight < 1, f"{worker}: {action}"
                self._used(worker, other, number)
                self.late.append((now, worker, number, other))
            case g.Average(attempt=attempt, members=members):
                assert members == self.members.get(attempt, members), f"{worker}: a mean of {members}"
            case g.Accept(digest=digest):
                self.accepted[worker] = digest

    def _used(self, worker: str, other: str, number: int) -> None:
        view = self.peers[worker]
        assert (number, other) not in view.used, f"{worker}: the model of {other} of round {number} twice"
        view.used.add((number, other))
        ours = [_facts(meet) for meet in self.meets.get((worker, other, number), ())]
        theirs = [_facts(meet) for meet in self.meets.get((other, worker, number), ())]
        agreed = any(facts in theirs for facts in ours)
        assert agreed, f"{worker} uses {other}'s model of round {number}: {ours} here, {theirs} there"

    # ---- what tests ask ----

    def one_sided(self) -> list[tuple[str, str, int]]:
        """Return (worker, other, round) where the first used the second's model and not the reverse.

        Of symmetric schemes; each moves the mean by a share of the pair's difference (specification,
        section 5).
        """
        used = {(worker, other, number) for _, worker, number, names in self.mixed for other in names}
        used |= {(worker, other, number) for _, worker, number, other in self.late}
        return sorted(found for found in used if (found[1], found[0], found[2]) not in used)

    def check_end(self) -> None:
        """Assert that all who took a mean took the one that was concluded."""
        assert self.concluded is not None, "no mean was made"
        assert set(self.accepted.values()) == {self.concluded.digest}, self.accepted


def _facts(meet: g.Meet) -> tuple[str, int, str, str, str]:
    return (meet.run, meet.epoch, meet.view, meet.schema, meet.form)
