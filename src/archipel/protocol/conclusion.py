"""How a gossip run ends: one peer makes the mean of all members' models, and all take it.

The rendezvous names a writer and the members. The writer passes that on, so that it is ready when they
answer; each sends its model; the writer adds them up as they come, divides, and sends the mean to all. A
member that is lost on the way makes the rendezvous name members anew, under another attempt.

Invariants: a mean is made of exactly the members of its attempt; the writer stays until the rendezvous knows
of it and each of them has it or has been away for a lease, but no longer than a while after. Whoever comes
back within the lease is sent it again.
"""

import math
from dataclasses import dataclass, field

from . import gossip as g
from . import messages as m


@dataclass
class Conclusion:
    """One peer's part in it."""

    name: str = ""
    conclude: g.Conclude | None = None
    losses: dict[str, float] = field(default_factory=dict)  # of the members whose models are on their way in
    summed: int = 0  # models added so far
    served: dict[str, None] = field(default_factory=dict)  # members that have the mean, or are gone
    away: dict[str, float] = field(default_factory=dict)  # members without a channel: when they count as gone
    concluded: g.Concluded | None = None  # the mean is made
    patience_s: float = 0.0
    patient_until: float = math.inf  # when all who have not taken it count as gone
    over: bool = False

    @property
    def made(self) -> bool:
        """Whether the mean is there."""
        return self.concluded is not None

    @property
    def writing(self) -> bool:
        """Whether this peer makes the mean."""
        return self.conclude is not None and self.conclude.writer == self.name

    def begin(self, name: str, conclude: g.Conclude) -> list[m.Action]:
        """Take up an attempt; a mean that is made already stays."""
        if self.made:
            return []
        self.name, self.conclude = name, conclude
        self.summed = 0
        self.losses.clear()
        self.served.clear()
        told = [other for other in conclude.members if other != name] if self.writing else []
        return [*(m.Send(other, conclude) for other in told), g.Submit(conclude.attempt)]

    def submitted(self, attempt: int, loss: float) -> list[m.Action]:
        """The own final model is copied."""
        if self.conclude is None or attempt != self.conclude.attempt:
            return []
        if not self.writing:
            return [m.Send(self.conclude.writer, g.Final(attempt, loss))]
        self.losses[self.name] = loss
        return [g.Gather(attempt, self.name)]

    def final(self, sender: str, final: g.Final) -> list[m.Action]:
        """A member's model is here; from one that lost its channel on the way, perhaps once more."""
        conclude = self.conclude
        if conclude is None or not self.writing or final.attempt != conclude.attempt:
            return []
        if self.concluded is not None and sender in conclude.members:
            return [m.Send(sender, g.Mean(self.concluded.digest, conclude.attempt))]
        if sender not in conclude.members or sender in self.losses:
            return []
        self.losses[sender] = final.loss
        return [g.Gather(final.attempt, sender)]

    def gathered(self, attempt: int) -> list[m.Action]:
        """A member's model is added."""
        conclude = self.conclude
        if conclude is None or attempt != conclude.attempt:
            return []
        self.summed += 1
        if self.summed < len(conclude.members):
            return []
        losses = tuple(self.losses[name] for name in conclude.members)
        return [g.Average(attempt, conclude.members, losses)]

    def averaged(self, now: float, event: g.Averaged, patience_s: float) -> list[m.Action]:
        """The mean is made: take it, tell the rendezvous, send it to all."""
        conclude = self.conclude
        if conclude is None or event.attempt != conclude.attempt or self.made:
            return []
        concluded = self.concluded = g.Concluded(event.digest, event.figures, event.attempt)
        self.patience_s, self.patient_until = patience_s, now + patience_s
        others = [name for name in conclude.members if name != self.name]
        means = [m.Send(name, g.Mean(event.digest, event.attempt)) for name in others]
        return [g.Accept(event.digest), m.Send(g.RENDEZVOUS, concluded), *means, *self.woke(now)]

    def connected(self, worker: str) -> list[m.Action]:
        """A channel is open again: what was said over the old one may not have arrived."""
        if worker == g.RENDEZVOUS:
            return [m.Send(worker, self.concluded)] if self.concluded is not None else []
        self.away.pop(worker, None)
        conclude = self.conclude
        if conclude is None or not self.writing or worker not in conclude.members:
            return []
        return [m.Send(worker, conclude)] if self.made or worker not in self.losses else []

    def disconnected(self, now: float, worker: str, lease_s: float) -> list[m.Action]:
        """A channel is gone; if it is not back within the lease, so is the member."""
        if worker != g.RENDEZVOUS:
            self.away[worker] = now + lease_s
        return self.woke(now) if self.made else []

    def took(self, now: float, worker: str) -> list[m.Action]:
        """A member has the mean: the others may take as long again."""
        if self.made:
            self.patient_until = now + self.patience_s
        return self.told(worker)

    def told(self, worker: str) -> list[m.Action]:
        """A member has the mean, or is gone."""
        if self.writing:
            self.served[worker] = None
            self._look()
        return []

    def woke(self, now: float) -> list[m.Action]:
        """The mean is made, and time passes: who is away for long is not waited for, at last nobody is."""
        for worker in [worker for worker, at in self.away.items() if now >= at]:
            del self.away[worker]
            self.told(worker)
        self.over = self.over or now >= self.patient_until
        return [] if self.over else [m.Wake(min([self.patient_until, *self.away.values()]))]

    def mean(self, sender: str, digest: str, rounds: int) -> list[m.Action]:
        """The mean is here."""
        if self.conclude is None or sender != self.conclude.writer:
            return []
        self.over = True
        return [g.Accept(digest), m.Send(sender, g.Got(rounds))]

    def _look(self) -> None:
        assert self.conclude is not None
        owed = (*self.conclude.members, g.RENDEZVOUS)
        self.over = self.made and all(name in (self.name, *self.served) for name in owed)
