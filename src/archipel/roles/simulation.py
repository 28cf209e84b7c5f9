"""Training in virtual time: the simulator's engine with ports that hold tensors, all workers in this process.

Speeds, links and faults are virtual, losses are real: what a storm costs in time and in quality, on a laptop,
the same each time. The merged model is evaluated as rounds go by, at no virtual cost, as the evaluator
process does live.
"""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import torch

from ..config import Config, settings_of
from ..protocol import messages as m
from ..sim.ports import ComputePort, Said
from ..sim.scenario import Outcome, Run, SimOptions, simulate
from ..train import data, models
from ..train.compute import OuterState
from ..train.evaluate import evaluate
from .local import LocalLearner, LocalSyncer
from .syncer import initial_weights, seeded


@dataclass
class Losses:
    """Validation losses of the merged model as the run went on."""

    config: Config
    outer: OuterState
    corpus: data.TokenData | data.ImageData
    points: list[dict[str, Any]] = field(default_factory=list)
    now: float = 0.0
    rounds: int = 0

    def __post_init__(self) -> None:
        options = self.config.evaluate
        self._batches = list(self.corpus.validation(options.batches, options.batch))
        self._model = models.build(self.config.model)

    def merged(self, fragment: int, version: int) -> None:
        """Count a merge; evaluate every `evaluate.every_rounds`."""
        self.rounds += 1
        if self.rounds % self.config.evaluate.every_rounds == 0:
            self.measure()

    def measure(self, own: torch.nn.Module | None = None) -> float:
        """Evaluate the merged model now, or a learner's own."""
        if own is None:
            state = {name: torch.from_numpy(array) for name, array in self.outer.tensors().items()}
            self._model.load_state_dict(state, strict=False)
        found = evaluate(self._model if own is None else own, self._batches)
        self.points.append(
            {"at_s": round(self.now, 3), "round": self.rounds, "loss": found.loss, "accuracy": found.accuracy}
        )
        return found.loss


def train_virtually(
    config: Config, sim: SimOptions, *, seed: int = 0, folder: Path | None = None, own_every: int = 0
) -> tuple[Outcome, Losses]:
    """Run `config` in virtual time with real tensors; return what happened and how the loss fell.

    own_every: of a run with one learner, that stands for data parallel and is hardly ever merged, its own
    weights are evaluated every so many steps; 0: never.
    """
    torch.set_num_threads(1)
    config = seeded(config)
    schema, weights, model = initial_weights(config, "")
    config = msgspec.structs.replace(config, model=model)
    corpus = data.load(config.data)
    outer = OuterState(schema, config.sync)
    outer.begin(weights)
    losses = Losses(config, outer, corpus)
    losses.measure()

    syncers: list[LocalSyncer] = []
    learners: dict[str, LocalLearner] = {}

    def make_port(name: str, said: Said) -> ComputePort:
        if name != m.SYNCER:
            learners[name] = LocalLearner(config, corpus, said)
            return learners[name]
        if not syncers:
            syncers.append(LocalSyncer(outer, said, losses.merged))
        else:
            syncers[0].restore()  # another process of the syncer, from the newest checkpoint
        return syncers[0]

    def watch(worker: str, now: float, event: m.Event, actions: list[m.Action]) -> None:
        losses.now = now
        if own_every and isinstance(event, m.StepCompleted) and event.step % own_every == 0:
            losses.measure(learners[worker].model)

    run = Run(
        config.sync,
        sim,
        name=config.run.name,
        seed=seed,
        shards=config.data.shards,
        settings=settings_of(config),
        schema=schema,
        make_port=make_port,
        rows=config.data.batch,
    )
    outcome = simulate(run, folder=folder, watch=watch)
    losses.measure()
    return outcome, losses
