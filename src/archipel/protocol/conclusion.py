"""How a gossip run ends: one peer makes the mean of all members' models, and all take it.

The rendezvous names a writer and the members. The writer passes that on, so that it is ready when they
answer; each sends its model; the writer adds them up as they come, divides, and sends the mean to all. A
member that is lost on the way makes the rendezvous name members anew, under another attempt.

Invariants: a mean is made of exactly the members of its attempt; the writer stays until each of them has the
mean or is gone and the rendezvous knows of it, but no longer than a while after.
"""

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
    concluded: g.Concluded | None = None  # the mean is made
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
        """A member's model is here."""
        conclude = self.conclude
        if conclude is None or not self.writing or final.attempt != conclude.attempt:
            return []
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

    def averaged(self, event: g.Averaged) -> list[m.Action]:
        """The mean is made: take it, tell the rendezvous, send it to all."""
        conclude = self.conclude
        if conclude is None or event.attempt != conclude.attempt or self.made:
            return []
        concluded = self.concluded = g.Concluded(event.digest, event.figures, event.attempt)
        others = [name for name in conclude.members if name != self.name and name not in self.served]
        means = [m.Send(name, g.Mean(event.digest, event.attempt)) for name in others]
        self._look()
        return [g.Accept(event.digest), m.Send(g.RENDEZVOUS, concluded), *means]

    def connected(self, worker: str) -> list[m.Action]:
        """A channel is open again: what was said over the old one may not have arrived."""
        if worker == g.RENDEZVOUS:
            return [m.Send(worker, self.concluded)] if self.concluded is not None else []
        conclude = self.conclude
        if conclude is None or not self.writing or worker not in conclude.members or worker in self.losses:
            return []
        return [m.Send(worker, conclude)]

    def disconnected(self, worker: str) -> list[m.Action]:
        """A channel is gone: whoever should have the mean over it will hear that the run is over."""
        return self.told(worker) if self.made and worker != g.RENDEZVOUS else []

    def told(self, worker: str) -> list[m.Action]:
        """A member has the mean, or is gone."""
        if self.writing:
            self.served[worker] = None
            self._look()
        return []

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
