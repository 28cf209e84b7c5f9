"""The evaluator process: validation loss of the merged model, at no cost to the learners.

It joins as an observer: it is sent every update, is never counted and never pulled from. It evaluates the initial
weights, then whenever `evaluate.every_rounds` more rounds have been merged, then the final weights, each time on the
same batches.
"""

from pathlib import Path

import torch

from ..config import Config
from ..train import data, models
from ..train.evaluate import Evaluation, evaluate
from .learner import Learner, Metrics, StopFlag, agreed

WAIT_S = 0.2


def watch(config: Config, *, syncer: str, out: Path, tls: str = "") -> None:
    """Evaluate until the run is done, writing lines of kind "validation" to `metrics.jsonl`."""
    torch.set_num_threads(1)
    stop = StopFlag()
    observer = Learner(torch.nn.Identity(), None, syncer=syncer, name="evaluator", out=out, tls=tls, role="observer")
    options = config.evaluate
    config = agreed(config, observer.connect())
    batches = list(data.load(config.data).validation(options.batches, options.batch))
    observer.model = model = models.build(config.model)
    observer.adopt()
    metrics = Metrics(out / "metrics.jsonl", observer)
    evaluated = -1
    while not (observer.done or stop.reason):
        if evaluated < 0 or observer.round >= evaluated + options.every_rounds:
            evaluated = observer.round
            _note(metrics, observer, evaluate(model, batches))
        observer.trainer.wait(WAIT_S)
    observer.trainer.close(stop.reason)
    if observer.round != evaluated:
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
