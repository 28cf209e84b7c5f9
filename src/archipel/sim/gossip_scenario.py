"""A gossip run in virtual time from a TOML file: peers' speeds, links and faults around the real protocol.

What `sim.scenario` is to learners and a syncer: the same section `[sim]`, with `fragment_bytes` for a whole
model, tapes as live peers write them, and a witness that watches every record.
"""

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from msgspec import to_builtins

from ..chaos.plan import Plan, play
from ..protocol import gossip as g
from ..protocol import messages as m
from ..protocol.peer import PeerMachine
from ..protocol.rendezvous import RendezvousMachine
from ..protocol.schedule import SyncOptions
from ..tape.replay import seed_of
from ..tape.tape import digest
from .gossip import GossipEngine
from .gossip_ports import GossipCosts, GossipPort
from .gossip_witness import GossipWitness
from .ports import Record, each
from .scenario import Run, SimOptions, costs_of, island_of, stepping_share, storm
from .tapes import Opening, Tapes

ONE_WAY = ("one_peer_exponential", "static_exponential")  # who hears another is not heard by it


@dataclass(frozen=True)
class GossipRun:
    """What is simulated. `settings`: of the whole run; `make_port`: where tensors take part."""

    options: g.GossipOptions
    sim: SimOptions
    name: str = "sim"
    seed: int = 0
    shards: int = 64
    settings: dict[str, Any] | None = None
    schema: tuple[m.TensorSpec, ...] = (m.TensorSpec("w", (1,)),)
    make_port: Callable[[str], GossipPort] | None = None
    rows: int = 0  # windows of a full batch, where tensors take part

    @property
    def names(self) -> list[str]:
        """The planned peers: the fastest first, what is slow last."""
        return [f"peer-{number}" for number in range(self.options.peers)]

    @property
    def compute(self) -> Run:
        """The same run as `sim.scenario` describes learners' compute, lines and weather."""
        steps = self.options.rounds * self.options.local_steps
        sync = SyncOptions(learners=self.options.peers, steps=steps, fragments=1)
        return Run(sync, self.sim, self.name, self.seed, self.shards, schema=self.schema, rows=self.rows)


@dataclass
class GossipOutcome:
    """What a simulated gossip run came to."""

    run: GossipRun
    engine: GossipEngine
    witness: GossipWitness
    plan: Plan
    complete: bool
    wall_s: float
    tape: str = ""
    tape_digest: str = ""

    def figures(self) -> dict[str, Any]:
        """Return the figures of a run, from its ledger and its decisions."""
        engine, witness = self.engine, self.witness
        table = engine.rendezvous.ledger.table()
        consumed = max(table["consumed"], 1)
        one_way = self.run.options.scheme in ONE_WAY
        return {
            "complete": self.complete,
            "rounds": max((number for _, _, number, _ in witness.mixed), default=-1) + 1,
            "round_s": round(self.round_s(), 6),
            "virtual_s": round(engine.now, 6),
            "goodput": round(stepping_share(engine.pace, self.run.names, engine.now), 6),
            "merged_share": round((table["merged"] + table["late"]) / consumed, 6),
            "late_models": len(witness.late),
            "one_sided": 0 if one_way else len(witness.one_sided()),
            "local_steps": {worker: steps for _, worker, _, steps in witness.local_steps},
            "sent_bytes": round(sum(engine.mesh.bytes_sent.values())),
            "tokens": {key: value for key, value in table.items() if isinstance(value, int)},
            "epochs": witness.epoch,
            "faults": len(self.plan.fault),
            "events": engine.handled,
            "events_per_s": round(engine.handled / max(self.wall_s, 1e-9)),
            "tape": self.tape,
            "tape_digest": self.tape_digest,
        }

    def round_s(self) -> float:
        """Return how long a round took, from peers' mean times in the second half of the run."""
        times: dict[int, list[float]] = {}
        for at, _, number, _ in self.witness.mixed:
            times.setdefault(number, []).append(at)
        marks = [statistics.fmean(times[number]) for number in sorted(times)]
        half = len(marks) // 2
        return (marks[-1] - marks[half]) / (len(marks) - 1 - half) if len(marks) > 2 else 0.0


def simulate(run: GossipRun, *, folder: Path | None = None, watch: Record | None = None) -> GossipOutcome:
    """Run to the end, or to the horizon. folder: where tapes go, None for none. watch: sees every record."""
    witness = GossipWitness()
    settings = run.settings or {"run": {"seed": run.seed}, "gossip": to_builtins(run.options)}
    tapes: Tapes | None = None
    told: list[Record] = [witness.record]
    engine = GossipEngine(
        run.options,
        GossipCosts(run.seed, run.sim.fragment_bytes, run.shards),
        run=run.name,
        on_record=each(told),
        make_port=run.make_port,
        schema=run.schema,
        settings=settings,
    )
    if folder is not None:
        tapes = Tapes(folder, run.name, lambda name: engine.hosts[name].machine, _opening(engine, settings))
        told.append(tapes.record)
    told += [watch] if watch is not None else []
    for number, name in enumerate(run.names):
        engine.add(name, costs_of(run.compute, number), island=island_of(run.compute, number))
    plan = storm(run.compute, run.names, m.SYNCER, g.RENDEZVOUS)
    play(plan, engine)
    began = time.perf_counter()
    try:
        engine.run(until=run.sim.horizon_s)
    finally:
        if tapes is not None:
            tapes.close()  # also of a run that the witness stopped: they are what one looks at then
    outcome = GossipOutcome(run, engine, witness, plan, engine.complete, time.perf_counter() - began)
    if tapes is not None:
        outcome.tape, outcome.tape_digest = str(tapes.folder), digest(tapes.folder)
    return outcome


def _opening(engine: GossipEngine, settings: dict[str, Any]) -> Callable[[str, m.Machine], Opening]:
    """Return what says how a tape begins. settings: of the whole run."""

    def opening(worker: str, machine: m.Machine) -> Opening:
        assert isinstance(machine, PeerMachine | RendezvousMachine)
        if isinstance(machine, RendezvousMachine):
            seed = seed_of(machine, engine.restored)
            return Opening(g.RENDEZVOUS, f"{engine.epochs:03d}", {**settings, **seed})
        return Opening(machine.role, machine.incarnation.replace(".", "-"), seed_of(machine))

    return opening
