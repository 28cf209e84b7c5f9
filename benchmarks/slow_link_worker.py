"""One worker of `slow_link.py`: a peer or a learner with a loop of its own, whose steps all take one time.

A real inner step takes a fraction of `--step-s`; the rest is slept, so that the step stands for an
accelerator's and cores that are shared do not show. After each exchange the weights go to a file, within the
next step's time. Steps that did not fit are counted.
"""

import argparse
import time
from pathlib import Path

import msgspec
import torch
from safetensors.torch import save_file
from torch import nn

import archipel
from archipel.config import Config, load
from archipel.roles.gossiping import fitted
from archipel.roles.worker import steps_of
from archipel.train import data, models, optim

WARM_STEPS = 3  # of a model that is thrown away: torch's first steps take long
GO_POLL_S = 0.01


class Steady:
    """Ends steps at a steady pace."""

    def __init__(self, step_s: float) -> None:
        self._step_s = step_s
        self._due = 0.0
        self.late = 0  # steps whose work did not fit
        self.work_s: list[float] = []

    def restart(self) -> None:
        """A step begins now, not when the last one was to end."""
        self._due = time.monotonic()

    def wait(self) -> None:
        """Sleep until the step is over."""
        left_s = self._due + self._step_s - time.monotonic()
        self.work_s.append(self._step_s - left_s)
        self._due += self._step_s
        if left_s < 0:
            self.late += 1
            self.restart()
            return
        time.sleep(left_s)


def weights_path(out: Path, rounds: int, name: str) -> Path:
    """Return the file of a worker's weights after so many exchanges."""
    return out / "weights" / f"{rounds:04d}-{name}.safetensors"


def _warm(config: Config, corpus: data.TokenData | data.ImageData) -> None:
    model, stream = models.build(config.model), corpus.stream(0, 0)
    optimizer, _ = optim.build(model, config.optimizer, 1)
    for _ in range(WARM_STEPS):
        batch = stream.next(config.data.batch)
        optim.inner_step(model, optimizer, batch, options=config.optimizer, lr=0.0)


def _wrapped(
    options: argparse.Namespace, config: Config, model: nn.Module, optimizer: torch.optim.Optimizer
) -> archipel.Peer | archipel.Learner:
    if config.gossip is None:
        return archipel.Learner(
            model,
            optimizer,
            syncer=options.centre,
            name=options.name,
            run=config.run.name,
            out=options.out,
            network=config.network,
        )
    return archipel.Peer(
        model,
        optimizer,
        rendezvous=options.centre,
        listen=options.listen,
        advertise=options.advertise,
        name=options.name,
        run=config.run.name,
        out=options.out,
        network=config.network,
    )


def train(options: argparse.Namespace) -> dict[str, float]:
    """Train until the run is over; return how the steps went."""
    torch.set_num_threads(1)
    config, corpus = fitted(load(options.config))
    model = models.build(config.model)
    optimizer, schedule = optim.build(model, config.optimizer, steps_of(config))
    _warm(config, corpus)
    (options.out / f"{options.name}.ready").touch()
    while not options.go.exists():
        time.sleep(GO_POLL_S)
    steady, rounds = Steady(options.step_s), 0
    with _wrapped(options, config, model, optimizer) as worker:
        stream = corpus.stream(worker.shard, worker.position)
        steady.restart()
        while not worker.done:
            batch = stream.next(config.data.batch)
            lr = schedule(worker.tick)
            _, tokens = optim.inner_step(model, optimizer, batch, options=config.optimizer, lr=lr)
            steady.wait()
            worker.step(tokens)
            if worker.round != rounds:
                steady.restart()
                rounds = worker.round
                # A detached copy of names that are unique: a tied head stands for no tensor of its own.
                named = {name: tensor.detach() for name, tensor in model.named_parameters()}
                save_file(named, weights_path(options.out, rounds, options.name))
        return {
            "shard": worker.shard,
            "steps": worker.step_count,
            "late_steps": steady.late,
            "work_s": round(sum(steady.work_s) / max(len(steady.work_s), 1), 4),
            "work_s_max": round(max(steady.work_s, default=0.0), 4),
        }


def main() -> None:
    """Train, and leave `<name>.json` behind."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("config", type=Path)
    parser.add_argument("--centre", required=True, help="host:port of the rendezvous or the syncer")
    parser.add_argument("--name", required=True)
    parser.add_argument("--listen", default="127.0.0.1:0")
    parser.add_argument("--advertise", default="")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--go", type=Path, required=True, help="joins once this file is there")
    parser.add_argument("--step-s", type=float, required=True)
    options = parser.parse_args()
    found = train(options)
    (options.out / f"{options.name}.json").write_bytes(msgspec.json.encode(found))


if __name__ == "__main__":
    main()
