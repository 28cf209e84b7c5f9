"""Gossip with tensors in one process: a peer's compute port, and whole runs in virtual time.

The same model, data, codecs and mixing as live peers have, without processes or sockets (`train.gossip`).
Speeds, lines and faults are virtual, losses are real. Four figures are taken as rounds go by, at no virtual
cost: the loss of the mean of all peers' models, their mean loss, the worst one's, and the consensus error.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch

from ..config import Config, settings_of
from ..errors import ConfigError
from ..numerics import mixing
from ..protocol import gossip as g
from ..protocol import messages as m
from ..sim.gossip_scenario import GossipOutcome, GossipRun, simulate
from ..sim.ports import Record
from ..sim.scenario import SimOptions
from ..train import data, models, optim
from ..train.evaluate import evaluate
from ..train.gossip import PeerState
from ..train.held import Held
from ..train.models import Batch
from ..train.options import fit
from .local import Corpus, train_on, trained
from .syncer import seeded

Saved = tuple[dict[str, np.ndarray], dict[str, Any]]
PENDING_MAX = 4  # points that wait for a peer that may be gone

Watched = Callable[[int, PeerState], None]


def options_of(config: Config) -> g.GossipOptions:
    """Return the run's gossip options. ConfigError without any."""
    if config.gossip is None:
        raise ConfigError("the configuration has no section [gossip]: it is a run with a syncer")
    return config.gossip


class LocalPeer:
    """One peer's compute port. `validation`: batches for its final loss; `settled`: told of each round."""

    def __init__(
        self,
        config: Config,
        corpus: Corpus,
        validation: list[Batch] | None = None,
        settled: Watched = lambda number, state: None,
    ) -> None:
        self._config, self._corpus = config, corpus
        self._validation, self._settled = validation, settled
        self.loss = float("nan")  # of the newest inner step

    def prepare(
        self, settings: dict[str, Any], shard: int, position: int, saved: Saved | None = None
    ) -> m.Prepared:
        """Build model, optimizer and data stream; go on from a checkpoint that `save` made, if any."""
        config, options = self._config, options_of(self._config)
        self.model = models.build(config.model)
        self._stream = self._corpus.stream(shard, position)
        steps = options.rounds * options.local_steps
        self._optimizer, self._schedule = optim.build(self.model, config.optimizer, steps)
        self.state = PeerState(self.model, self._optimizer, options, self._evaluate())
        if saved is not None:
            arrays, facts = saved
            self.state.restore({name: array.copy() for name, array in arrays.items()}, facts)
        return m.Prepared(self.state.schema)

    def _evaluate(self) -> Callable[[], float] | None:
        batches = self._validation
        return None if batches is None else lambda: evaluate(self.model, batches).loss

    @property
    def sequence(self) -> int:
        """Tokens of one row."""
        return self._stream.sequence

    def step(self, number: int, tick: int, rows: int | None = None) -> tuple[int, tuple[int, ...]]:
        """Take inner step `number` at the learning rate of `tick`; return its tokens, and ()."""
        batch = self._stream.next(self._config.data.batch if rows is None else rows)
        self.loss, tokens = optim.inner_step(
            self.model, self._optimizer, batch, options=self._config.optimizer, lr=self._schedule(tick)
        )
        self.state.steps += 1
        return tokens, ()

    def act(self, action: m.Action, payload: Any) -> m.Event | None:
        """Carry out an action; return the event that answers it."""
        event = self.state.act(action, payload)
        if isinstance(event, g.Mixed):
            self._settled(event.round, self.state)
        return event

    def payload(self, to: str, message: m.Message) -> np.ndarray | None:
        """Return what travels beside a message."""
        return self.state.payload(to, message)

    def save(self, number: int) -> Saved:
        """Return a copy of the whole state."""
        arrays = {name: array.copy() for name, array in self.state.arrays().items()}
        return arrays, self.state.facts(number)

    # ---- stopping on the way ----

    @property
    def position(self) -> int:
        """Tokens of the shard drawn so far."""
        return self._stream.position

    def trained(self) -> dict[str, np.ndarray]:
        """Return by name every array that the next step depends on; the rest is `PeerState.held`."""
        return trained(self.model, self._optimizer)

    def load(self, arrays: dict[str, np.ndarray], held: Held) -> None:
        """Go on from both, after `prepare` with the `position` that belongs to them."""
        train_on(self.model, self._optimizer, arrays)
        self.state.hold(held)


@dataclass
class Figures:
    """The four figures of a gossip run as it went on, one point every `evaluate.every_rounds` rounds.

    A point is taken of all peers' models as they were when each had settled the round; peers that never
    settle it are left out.
    """

    config: Config
    validation: list[Batch]
    points: list[dict[str, Any]] = field(default_factory=list)
    now: float = 0.0
    _pending: dict[int, dict[str, torch.Tensor]] = field(default_factory=dict)  # round -> peer -> model

    def __post_init__(self) -> None:
        self._model = models.build(self.config.model)
        self._state = PeerState(self._model, None, options_of(self.config))
        self._take(0, {"": self._state.anchor})

    def settled(self, name: str) -> Watched:
        """Return what one peer tells of each round it has settled."""

        def note(number: int, state: PeerState) -> None:
            self.note(number + 1, name, state.anchor)

        return note

    def note(self, rounds: int, name: str, model: torch.Tensor) -> None:
        """Take in a peer's model after so many rounds. It is kept, not copied."""
        options = options_of(self.config)
        if rounds % self.config.evaluate.every_rounds and rounds != options.rounds:
            return
        models_there = self._pending.setdefault(rounds, {})
        models_there[name] = model
        if len(models_there) == options.peers:
            self._take(rounds, self._pending.pop(rounds))
        while len(self._pending) > PENDING_MAX:
            oldest = min(self._pending)
            self._take(oldest, self._pending.pop(oldest))

    def close(self) -> None:
        """Take the points that still wait."""
        for rounds in sorted(self._pending):
            self._take(rounds, self._pending.pop(rounds))
        self.points.sort(key=lambda point: int(point["round"]))

    def _take(self, rounds: int, vectors: dict[str, torch.Tensor]) -> None:
        found = [vectors[name] for name in sorted(vectors)]
        mean = torch.stack(found).double().mean(0).float()
        together = self._loss(mean)
        each = [self._loss(vector) for vector in found] if len(found) > 1 else [together]
        self.points.append(
            {
                "at_s": round(self.now, 3),
                "round": rounds,
                "peers": len(found),
                "loss": together.loss,
                "accuracy": together.accuracy,
                "mean": sum(one.loss for one in each) / len(each),
                "worst": max(one.loss for one in each),
                "consensus_error": mixing.consensus_error(found).relative,
            }
        )

    def _loss(self, vector: torch.Tensor) -> Any:
        self._state.load(vector)
        return evaluate(self._model, self.validation)


def fitted(config: Config) -> tuple[Config, Corpus]:
    """Return the configuration with the run's seed and the data's sizes in it, and the data."""
    config = seeded(config)
    corpus = data.load(config.data)
    return msgspec.structs.replace(config, model=fit(config.model, config.data, corpus.vocabulary)), corpus


def gossip_virtually(
    config: Config, sim: SimOptions, *, seed: int = 0, folder: Path | None = None, watch: Record | None = None
) -> tuple[GossipOutcome, Figures]:
    """Run `config` in virtual time with real tensors; return what happened and how the figures went."""
    torch.set_num_threads(1)
    config, corpus = fitted(config)
    validation = list(corpus.validation(config.evaluate.batches, config.evaluate.batch))
    figures = Figures(config, validation)

    def make_port(name: str) -> LocalPeer:
        return LocalPeer(config, corpus, validation, figures.settled(name))

    def note_time(worker: str, now: float, event: m.Event, actions: list[m.Action]) -> None:
        figures.now = now
        if watch is not None:
            watch(worker, now, event, actions)

    run = GossipRun(
        options_of(config),
        sim,
        config.run.name,
        seed,
        config.data.shards,
        settings=settings_of(config),
        make_port=make_port,
        rows=config.data.batch,
    )
    outcome = simulate(run, folder=folder, watch=note_time)
    figures.close()
    return outcome, figures
