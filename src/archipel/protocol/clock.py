"""Vector clocks, carried sparsely: what each worker knows of every other worker's progress (appendix E).

A learner's own component is its inner step, the syncer's its tick, as in ⟨L0:10, L1:8, S:8⟩. A message
carries only the components that changed since the last one on the same channel. Between syncer and learners
those are two at most (the sender's own and what it last heard of the receiver): passing every learner's step
on to every other would cost M² components a tick, and the syncer's own tape holds them anyway.
"""

from dataclasses import dataclass, field


@dataclass
class VectorClock:
    """Components only grow. `told` remembers, per channel, what the other side was already sent."""

    owner: str
    steps: dict[str, int] = field(default_factory=dict)
    told: dict[str, dict[str, int]] = field(default_factory=dict)

    def advance(self, step: int) -> None:
        """Set the owner's component; going back is ignored."""
        self.observe({self.owner: step})

    def observe(self, components: dict[str, int]) -> dict[str, int]:
        """Take in what a message carried; return the components that were news."""
        news = {worker: step for worker, step in components.items() if step > self.steps.get(worker, -1)}
        self.steps.update(news)
        return news

    def delta(self, receiver: str) -> dict[str, int]:
        """Return what to put on the next message to `receiver`, and remember that it was told."""
        told = self.told.setdefault(receiver, {})
        changed = {
            worker: self.steps[worker]
            for worker in (self.owner, receiver)
            if worker in self.steps and told.get(worker) != self.steps[worker]
        }
        told.update(changed)
        return changed

    def forget(self, receiver: str) -> None:
        """A channel was lost: the next message on a new one carries everything again."""
        self.told.pop(receiver, None)


def happened_before(first: dict[str, int], second: dict[str, int]) -> bool:
    """Return whether a moment with clock `first` surely came before one with clock `second`."""
    return all(step <= second.get(worker, -1) for worker, step in first.items()) and first != second
