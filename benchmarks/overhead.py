"""What does `learner.step` cost a training loop? Same loop with and without it, interleaved in one process.

    python benchmarks/overhead.py [--steps 96] [--tokens 512]

A real run: the syncer and this learner's courier on the other core, P = H = 24, pushes in bf16, a decoder of
5 million parameters. Blocks of six steps with and without `learner.step` alternate, so that drift of the
machine hits both. Prints where the time goes, and last `overhead: ratio (limit 1.03)`, the ratio of median
step times.
"""

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch

from archipel.api import Learner
from archipel.config import dump, load
from archipel.train import data, models, optim
from archipel.train.options import fit

BLOCK = 6
LIMIT = 1.03
OVERRIDES = [
    "run.name=overhead", "sync.learners=1", "sync.fragments=24", "sync.interval_steps=24",
    "sync.outer_momentum=0.5", "sync.steps=100000", "model.width=256", "model.layers=6",
    "model.heads=8", "data.sequence=128",
]  # fmt: skip


def on_core(core: int, pid: int) -> None:
    """Keep a process on one core, where there are several."""
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(pid, {cores[core % len(cores)]})


def start_syncer(folder: Path) -> tuple[subprocess.Popen, str]:
    """Start a syncer and return it with its address."""
    arguments = [
        "syncer",
        str(folder / "run.toml"),
        "--out",
        str(folder / "syncer"),
        "--listen",
        "127.0.0.1:0",
    ]
    address = folder / "address"
    command = [sys.executable, "-m", "archipel", *arguments, "--address-file", str(address)]
    log = (folder / "syncer.log").open("w")
    process = subprocess.Popen(command, stderr=log, env={**os.environ, "OMP_NUM_THREADS": "1"})
    deadline = time.monotonic() + 60
    while not address.exists():
        if process.poll() is not None or time.monotonic() > deadline:
            raise SystemExit((folder / "syncer.log").read_text())
        time.sleep(0.05)
    return process, address.read_text()


class Stopwatch:
    """Times a method of an object, call by call."""

    def __init__(self, owner: object, name: str) -> None:
        self.times: list[float] = []
        inner = getattr(owner, name)

        def timed(*arguments, **named):
            began = time.perf_counter()
            try:
                return inner(*arguments, **named)
            finally:
                self.times.append(time.perf_counter() - began)

        setattr(owner, name, timed)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=96, help="of each kind")
    parser.add_argument("--tokens", type=int, default=512, help="per step")
    options = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as name:
        measure(Path(name), options)


def measure(folder: Path, options: argparse.Namespace) -> None:
    """Run the loop and print what was found."""
    config = load(None, OVERRIDES)
    (folder / "run.toml").write_text(dump(config))
    syncer, address = start_syncer(folder)
    corpus = data.load(config.data)
    model = models.build(fit(config.model, config.data, corpus.vocabulary))
    optimizer, _ = optim.build(model, config.optimizer, config.sync.steps)
    batch = options.tokens // config.data.sequence
    with Learner(model, optimizer, syncer=address, name="learner-0", out=folder / "learner") as learner:
        on_core(0, 0)
        on_core(1, syncer.pid)
        on_core(1, learner.trainer._courier.pid)
        stream = corpus.stream(learner.shard, learner.position)
        owners = {"_receive": learner.trainer, "copies": learner.trainer.half, "_land": learner.trainer}
        watches = {part: Stopwatch(owner, part) for part, owner in owners.items()}
        calls = Stopwatch(learner, "step")
        times = run_blocks(model, optimizer, stream, learner, config, options.steps, batch)
    syncer.terminate()
    syncer.wait()
    report(model, times, calls, watches)


def run_blocks(model, optimizer, stream, learner, config, steps: int, batch: int) -> dict[bool, list[float]]:
    """Return step times, with and without `learner.step`; the first block of each kind is warm-up."""
    times: dict[bool, list[float]] = {True: [], False: []}
    for block in range(2 * (steps // BLOCK) + 2):
        with_step = block % 2 == 0
        for _ in range(BLOCK):
            began = time.perf_counter()
            drawn = stream.next(batch)
            optim.inner_step(model, optimizer, drawn, options=config.optimizer, lr=1e-3)
            if with_step:
                learner.step(tokens=drawn.inputs.numel())
            if block >= 2:
                times[with_step].append(time.perf_counter() - began)
    return times


def report(model, times, calls: Stopwatch, watches: dict[str, Stopwatch]) -> None:
    """Print medians, the longest call and where it goes."""
    with_step, without = statistics.median(times[True]), statistics.median(times[False])
    counted = calls.times[BLOCK:]
    print(f"parameters {models.parameter_count(model):,}, {len(times[True])} steps of each kind")
    print(f"median step: {1e3 * with_step:.2f} ms with learner.step, {1e3 * without:.2f} ms without")
    print(
        f"learner.step: median {1e3 * statistics.median(counted):.3f} ms, longest {1e3 * max(counted):.2f} ms"
    )
    names = {
        "_receive": "frames from the courier",
        "copies": "copies into shared memory",
        "_land": "updates landing",
    }
    for part, watch in watches.items():
        share = sum(watch.times) / max(sum(calls.times), 1e-9)
        print(f"  {names[part]}: {100 * share:.0f} % of it")
    print(f"overhead: {with_step / without:.4f} (limit {LIMIT})")


if __name__ == "__main__":
    main()
