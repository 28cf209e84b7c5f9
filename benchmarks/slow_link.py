"""One of four workers has 10 or 20 % of the others' bandwidth: how long to a fixed loss? Live, and predicted.

    python benchmarks/slow_link.py [--out FILE] [--table] [--predict] [--only TEXT] [--rounds N] [--relays]

Four processes train one model on the default corpus from the same weights, with the same seeds and shards:
DiLoCo with a syncer, and gossip peers (1-peer with fixed H, 1-peer and 2-peer with adapted H). Lines are
shaped (`slow_link_network.py`): each worker's line carries a model in 3 steps' time each way, the last
worker's in 30 or 15 (c = 3, r = 0.1 or 0.2 of GASLoC's round times). Steps are padded to a fixed time, many
times what they need (`slow_link_worker.py`): they stand for an accelerator's. Timeouts are lifted, so that
with fixed H the others wait for the slow peer and do not skip it. All payloads are float32.

Beside it stands what the simulator predicts for the same configuration, with tensors. Both are read off their
tapes by the same lines: time begins with the first step; a round of gossip is over when the last peer has
settled it, one of DiLoCo when the syncer has merged it. The loss is the validation loss of the mean of all
workers' weights after a round; a target is reached at the first round at or below it.

All predictions are made first, then the live runs. Each is written to FILE when it is done; one that is there
is not run again. Nothing else should run beside the live ones.
"""

import argparse
import signal
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import torch
from safetensors.torch import load_file
from slow_link_network import CENTRE, Lines, lines
from slow_link_worker import weights_path

from archipel.config import Config, dump, load
from archipel.protocol import gossip as g
from archipel.protocol import messages as m
from archipel.roles.gossiping import fitted, gossip_virtually
from archipel.roles.simulation import train_virtually
from archipel.runtime.launch import Launcher, WorkerProgram
from archipel.sim.network import LinkOptions
from archipel.sim.scenario import SimOptions
from archipel.tape import tape
from archipel.train import models
from archipel.train.evaluate import evaluate

WORKERS, ROUNDS, LOCAL_STEPS = 4, 24, 30
STEP_S = 0.06
TRANSFER_STEPS = 3.0  # c: a model over a full line, in steps
SLOW = (0.1, 0.2)  # r
LATENCY_S = 0.001  # one way, in the prediction: about what two processes here take to talk
LOSSES = (2.3, 2.15)
TIMEOUT_S = 20.0  # more than two models over the slow line and all local steps
COMMON = [
    "run.seed=0", "model.width=96", "model.layers=2", "model.heads=4", "data.sequence=64", "data.batch=4",
    "optimizer.lr=3e-3", "optimizer.warmup_steps=30", "optimizer.schedule=constant",
    "evaluate.every_rounds=1", "evaluate.batches=8", "evaluate.batch=16",
]  # fmt: skip
GOSSIP = [
    f"gossip.peers={WORKERS}", f"gossip.local_steps={LOCAL_STEPS}", "gossip.outer_lr=0.7",
    f"gossip.timeout_s_min={TIMEOUT_S}", f"gossip.timeout_s_max={TIMEOUT_S}", "gossip.checkpoint_rounds=0",
]  # fmt: skip
DILOCO = [
    f"sync.learners={WORKERS}", f"sync.quorum={WORKERS}", "sync.fragments=1", "sync.overlap_steps=0",
    f"sync.interval_steps={LOCAL_STEPS}", "sync.merge=average", "sync.outer_lr=0.7",
    "sync.outer_momentum=0.5", "sync.push_codec=float32", "sync.update_codec=float32",
]  # fmt: skip
METHODS = {
    "DiLoCo": DILOCO,
    "1-peer, fixed H": [*GOSSIP, "gossip.scheme=one_peer", "gossip.adapt=false"],
    "1-peer, adapted H": [*GOSSIP, "gossip.scheme=one_peer", "gossip.adapt=true"],
    "2-peer, adapted H": [*GOSSIP, "gossip.scheme=two_peer", "gossip.adapt=true"],
}


@dataclass(frozen=True)
class Cell:
    """One method at one bandwidth of the slow worker."""

    method: str
    share: float  # r
    rounds: int

    @property
    def name(self) -> str:
        return f"{self.method}, r = {self.share}"

    @property
    def config(self) -> Config:
        steps = self.rounds * LOCAL_STEPS + 1  # so that learners live to see the last merge
        length = f"sync.steps={steps}" if self.method == "DiLoCo" else f"gossip.rounds={self.rounds}"
        return load(None, [*COMMON, *METHODS[self.method], length])

    @property
    def workers(self) -> list[str]:
        """Names as the simulator gives them; the slow one is the last."""
        role = "learner" if self.method == "DiLoCo" else "peer"
        return [f"{role}-{number}" for number in range(WORKERS)]

    def rates(self, model_bytes: int) -> dict[str, float]:
        """Return each worker's bytes a second."""
        full = model_bytes / (TRANSFER_STEPS * STEP_S)
        return {name: full * (self.share if name == self.workers[-1] else 1.0) for name in self.workers}


# ---- what a run's tapes say ----


@dataclass
class Told:
    """When rounds were over, and what the last worker did in them."""

    start: float = 0.0  # when the last worker began its first step
    over: dict[int, float] = field(default_factory=dict)  # rounds behind -> seconds from the start
    slow_steps: list[int] = field(default_factory=list)  # H_i of the slow worker, round by round
    fates: Counter[str] = field(default_factory=Counter)
    late_models: int = 0

    @property
    def round_s(self) -> float:
        """How long a round took, in the second half of the run."""
        last = max(self.over)
        half = last // 2
        return (self.over[last] - self.over[half]) / (last - half)


def told(folder: Path, slow: str) -> Told:
    """Read a run's tapes, live or simulated."""
    found = Told()
    for file in tape.workers(folder):
        for record in tape.read(file.path):
            _note(found, file.worker == slow, record)
    found.over = {number: at - found.start for number, at in sorted(found.over.items())}
    return found


def _note(found: Told, slow: bool, record: Any) -> None:
    match record.event:
        case m.StepCompleted(step=1, step_s=step_s):
            found.start = max(found.start, record.t - step_s)
        case m.Merged(version=number):
            found.over[number] = record.t
        case g.Mixed(round=number):
            found.over[number + 1] = max(found.over.get(number + 1, 0.0), record.t)
    for action in record.actions:
        match action:
            case m.Send(message=g.Report(local_steps=steps, fate=fate)):
                found.fates[fate] += 1
                if slow and fate != "late":
                    found.slow_steps.append(steps)
            case g.Correct():
                found.late_models += 1


def summary(found: Told, losses: dict[int, float]) -> dict[str, Any]:
    """Return what is kept of a run."""
    half = found.slow_steps[len(found.slow_steps) // 2 :]
    return {
        "round_s": round(found.round_s, 4),
        "slow_steps": statistics.median(half) if half else LOCAL_STEPS,
        "fates": dict(found.fates),
        "late_models": found.late_models,
        "points": [[n, round(found.over[n], 3), round(losses[n], 4)] for n in found.over if n in losses],
    }


# ---- predicted ----


def predict(cell: Cell, model_bytes: int) -> dict[str, Any]:
    """Run a cell in virtual time."""
    config, rates = cell.config, cell.rates(model_bytes)
    full, slow = (rates[name] for name in (cell.workers[0], cell.workers[-1]))
    link = LinkOptions(latency_s=LATENCY_S, bytes_per_s=full)
    sim = SimOptions(compute="tensors", step_s=STEP_S, link=link, slow_link_bytes_per_s=slow)
    with tempfile.TemporaryDirectory() as name:
        folder, run = Path(name), gossip_virtually if config.gossip else train_virtually
        outcome, figures = run(config, sim, seed=config.run.seed, folder=folder)
        assert outcome.complete, cell.name
        losses = {int(point["round"]): float(point["loss"]) for point in figures.points}
        return summary(told(folder, cell.workers[-1]), losses)


# ---- live ----


def live(cell: Cell, model_bytes: int, *, relays: bool) -> dict[str, Any]:
    """Run a cell's processes over shaped lines."""
    deadline_s = 60.0 + 3 * cell.rounds * STEP_S * (LOCAL_STEPS + 2 * TRANSFER_STEPS / cell.share)
    network = lines(cell.rates(model_bytes), relays=relays)
    try:
        with tempfile.TemporaryDirectory() as name, Launcher(Path(name)) as launcher:
            out = Path(name)
            _start(cell, network, launcher, out)
            _wait(lambda: not launcher.running, deadline_s, launcher)
            found = told(out, cell.workers[-1])
            workers = [msgspec.json.decode((out / f"{one}.json").read_bytes()) for one in cell.workers]
            shards = [one["shard"] for one in workers]
            assert shards == list(range(WORKERS)), f"shards {shards}: not those of the prediction"
            return {
                **summary(found, _losses(cell, out, list(found.over))),
                "lines": network.kind,
                "workers": workers,
            }
    finally:
        network.close()


def _start(cell: Cell, network: Lines, launcher: Launcher, out: Path) -> None:
    """Start the centre and the workers; let them join in the order of their names, each to its shard."""
    file, address = out / "run.toml", out / "address"
    file.write_text(dump(cell.config))
    (out / "weights").mkdir()
    python, gossip = [sys.executable], cell.config.gossip is not None
    where = ["--listen", network.listen(CENTRE), "--address-file", str(address), "--out", str(out)]
    role = g.RENDEZVOUS if gossip else m.SYNCER
    centre = [*network.command(CENTRE), *python, "-m", "archipel", role, str(file), *where]
    launcher.start(WorkerProgram(CENTRE, tuple(centre), restart=False))
    _wait(address.exists, 60.0, launcher)
    for name in cell.workers:
        home = network.to_centre(name, address.read_text(), payloads=not gossip)
        argv = [
            *network.command(name),
            *python,
            str(Path(__file__).with_name("slow_link_worker.py")),
            str(file),
        ]
        argv += ["--centre", home, "--name", name, "--out", str(out), "--go", str(out / f"{name}.go")]
        argv += ["--step-s", str(STEP_S), "--listen", network.listen(name)]
        argv += ["--advertise", network.advertise(name) if gossip else ""]
        launcher.start(WorkerProgram(name, tuple(argv), restart=False))
    _wait(lambda: all((out / f"{name}.ready").exists() for name in cell.workers), 60.0, launcher)
    for name in cell.workers:
        (out / f"{name}.go").touch()
        time.sleep(1.0)  # a courier's start


def _wait(holds: Any, deadline_s: float, launcher: Launcher) -> None:
    deadline = time.monotonic() + deadline_s
    while not holds():
        for ended in launcher.poll():
            if not ended.clean:
                raise SystemExit(f"{ended.name} failed:\n{ended.log_tail}")
        if time.monotonic() > deadline:
            raise SystemExit(f"not over after {deadline_s:.0f} s")
        time.sleep(0.05)


def _losses(cell: Cell, out: Path, rounds: list[int]) -> dict[int, float]:
    """Return the loss of the mean of all workers' weights after each round."""
    config, corpus = fitted(cell.config)
    model, found = models.build(config.model), {}
    batches = list(corpus.validation(config.evaluate.batches, config.evaluate.batch))
    for number in rounds:
        files = [weights_path(out, number, name) for name in cell.workers]
        states = [load_file(file) for file in files if file.exists()]  # who skipped a round has none of it
        mean = {key: torch.stack([state[key] for state in states]).mean(0) for key in states[0]}
        model.load_state_dict(mean, strict=False)  # a tied head has no weights of its own
        found[number] = evaluate(model, batches).loss
    return found


# ---- the table ----


def reached(run: dict[str, Any], loss: float) -> float | None:
    """Return when a run was at or below a loss first."""
    return next((at_s for _, at_s, found in run["points"] if found <= loss), None)


def print_table(cells: dict[str, Any], targets: list[float]) -> None:
    """Print live beside predicted: "live / predicted (ratio)"."""
    columns = [
        "method",
        "H of the slow",
        "a round, s",
        *(f"to {loss}, s" for loss in targets),
        "loss at the end",
    ]
    print("| " + " | ".join(columns) + " |")
    print("|" + "---|" * len(columns))
    for name, cell in cells.items():
        runs = [cell.get("live"), cell.get("predicted")]
        row = [
            name,
            _pair(runs, lambda run: f"{run['slow_steps']:g}"),
            _compared(runs, lambda run: run["round_s"]),
        ]
        row += [_compared(runs, partial(reached, loss=loss)) for loss in targets]
        row.append(_pair(runs, lambda run: f"{run['points'][-1][2]:.3f}"))
        print("| " + " | ".join(row) + " |")


def _pair(runs: list[Any], word: Callable[[Any], str]) -> str:
    return " / ".join("—" if run is None else word(run) for run in runs)


def _compared(runs: list[Any], number: Callable[[Any], float | None]) -> str:
    ours, predicted = (None if run is None else number(run) for run in runs)
    words = " / ".join("—" if value is None else f"{value:.1f}" for value in (ours, predicted))
    return f"{words} ({ours / predicted:.2f})" if ours and predicted else words


# ---- the command ----


def parse() -> argparse.Namespace:
    """Return the command's options."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "slow_link.json")
    parser.add_argument("--table", action="store_true", help="print what is there; run nothing")
    parser.add_argument("--predict", action="store_true", help="no live runs")
    parser.add_argument("--only", default="", help="cells whose names hold this text")
    parser.add_argument("--rounds", type=int, default=ROUNDS, help="fewer: does it run?")
    parser.add_argument("--loss", type=float, action="append", help="a target; may be said again")
    parser.add_argument("--relays", action="store_true", help="no namespaces, whoever we are")
    return parser.parse_args()


def fill(found: dict[str, Any], options: argparse.Namespace) -> Iterator[str]:
    """Run what is missing; yield the name of each part that is new in `found`."""
    cells = [Cell(name, r, options.rounds) for r in SLOW for name in METHODS]
    model = models.build(fitted(cells[0].config)[0].model)
    model_bytes = 4 * sum(parameter.numel() for parameter in model.parameters())
    run_live = partial(live, relays=options.relays)
    kinds = {"predicted": predict} if options.predict else {"predicted": predict, "live": run_live}
    for kind, run in kinds.items():
        for cell in cells:
            if options.only in cell.name and kind not in found.get(cell.name, {}):
                found.setdefault(cell.name, {})[kind] = run(cell, model_bytes)
                yield f"{cell.name}: {kind}"


def main() -> None:
    options = parse()
    torch.set_num_threads(1)  # two spin against each other where the cores have other work
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("stopped"))
    found: dict[str, Any] = msgspec.json.decode(options.out.read_bytes()) if options.out.exists() else {}
    began = time.monotonic()
    for new in fill(found, options) if not options.table else ():
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_bytes(msgspec.json.encode(found))
        print(f"{new}, {time.monotonic() - began:.0f} s", flush=True)
        began = time.monotonic()
    print_table(found, options.loss or list(LOSSES))


if __name__ == "__main__":
    main()
