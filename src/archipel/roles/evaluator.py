"""The evaluator process: validation loss of the merged model, at no cost to the learners.

It joins as an observer: it is sent every update, is never counted and never pulled from. It evaluates the
initial weights, then whenever `evaluate.every_rounds` more rounds have been merged, then the final weights,
each time on the same batches.
"""

import os
from pathlib import Path

import torch

from ..config import Config
from ..train import models
from ..train.evaluate import Evaluation, evaluate
from .fragments import Fragments
from .worker import Metrics, Parting, StopFlag, Worker, agreed, load_data

WAIT_S = 0.2


def watch(
    config: Config, *, syncer: str, out: Path, tls: str = "", nice: int = 0, fresh: bool = False
) -> None:
    """Evaluate until the run is done, writing lines of kind "validation" to `metrics.jsonl`.

    fresh: the run began with the weights its configuration makes. They are evaluated first, as round 0,
    however far the run has come by the time we are ready.
    """
    torch.set_num_threads(1)
    fragments = Fragments()
    observer = Worker(
        fragments,
        role="observer",
        home=syncer,
        name="evaluator",
        run=config.run.name,
        out=out,
        tls=tls,
        network=config.network,
        stopped=StopFlag(),
    )
    settings = observer.connect()
    os.nice(nice)
    with Parting(observer):
        if not observer.done:
            _watch(agreed(config, settings), observer, fragments, fresh)


def _watch(config: Config, observer: Worker, held: Fragments, fresh: bool) -> None:
    options = config.evaluate
    batches = list(load_data(config, observer.settings).validation(options.batches, options.batch))
    model = models.build(config.model)
    metrics = Metrics(observer.out / "metrics.jsonl", observer)
    evaluated = -1
    if fresh:
        evaluated = 0
        _note(metrics, 0, 0, evaluate(model, batches))
    observer.adopt(model)
    while not observer.done:
        # A syncer that resumed from a checkpoint takes the weights, and their round, back.
        if evaluated < 0 or not evaluated <= held.round < evaluated + options.every_rounds:
            evaluated = held.round
            _note(metrics, evaluated, observer.tick, evaluate(model, batches))
        observer.trainer.wait(WAIT_S)
    if held.round != evaluated and not observer.stopped():
        _note(metrics, held.round, observer.tick, evaluate(model, batches))


def _note(metrics: Metrics, merges: int, tick: int, found: Evaluation) -> None:
    metrics.write(
        kind="validation",
        round=merges,
        tick=tick,
        loss=found.loss,
        accuracy=found.accuracy,
        tokens=found.tokens,
    )
