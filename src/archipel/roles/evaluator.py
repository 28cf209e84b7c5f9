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
from .learner import Learner, Metrics, Parting, StopFlag, agreed, load_data

WAIT_S = 0.2


def watch(config: Config, *, syncer: str, out: Path, tls: str = "", nice: int = 0) -> None:
    """Evaluate until the run is done, writing lines of kind "validation" to `metrics.jsonl`."""
    torch.set_num_threads(1)
    observer = Learner(
        torch.nn.Identity(),  # until the syncer has said which model
        None,
        syncer=syncer,
        name="evaluator",
        run=config.run.name,
        out=out,
        tls=tls,
        role="observer",
        network=config.network,
        stopped=StopFlag(),
    )
    settings = observer.connect()
    os.nice(nice)
    with Parting(observer):
        if not observer.done:
            _watch(agreed(config, settings), observer)


def _watch(config: Config, observer: Learner) -> None:
    options = config.evaluate
    batches = list(load_data(config, observer.settings).validation(options.batches, options.batch))
    observer.model = model = models.build(config.model)
    observer.adopt()
    metrics = Metrics(observer.out / "metrics.jsonl", observer)
    evaluated = -1
    while not observer.done:
        # A syncer that resumed from a checkpoint takes the weights, and their round, back.
        if evaluated < 0 or not evaluated <= observer.round < evaluated + options.every_rounds:
            evaluated = observer.round
            _note(metrics, observer, evaluate(model, batches))
        observer.trainer.wait(WAIT_S)
    if observer.round != evaluated and not observer.stopped():
        _note(metrics, observer, evaluate(model, batches))


def _note(metrics: Metrics, observer: Learner, found: Evaluation) -> None:
    metrics.write(
        kind="validation",
        round=observer.round,
        tick=observer.tick,
        loss=found.loss,
        accuracy=found.accuracy,
        tokens=found.tokens,
    )
