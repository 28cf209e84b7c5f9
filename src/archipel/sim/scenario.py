"""A run in virtual time from a TOML file: learners' speeds, links and faults around the real protocol.

Section `[sim]` says what a run's compute and network cost, `[sync]` and the rest are those of a live run. The
outcome is a tape per worker, as a live run writes them, and what can be read off it. With costs only, tokens
are counted and nothing is learned; with a port that holds tensors the same run trains (`roles.simulation`).

Invariants: one seed, one tape, byte for byte; a witness watches every record and fails at what must never
happen.
"""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from msgspec import Struct, to_builtins
from msgspec.structs import replace

from ..chaos.plan import Plan, Weather, draw, load, play
from ..errors import ConfigError
from ..protocol import messages as m
from ..protocol.learner import LearnerMachine
from ..protocol.schedule import SyncOptions
from ..protocol.syncer import SyncerMachine
from ..tape.replay import seed_of
from ..tape.tape import digest
from . import bandwidth
from .engine import Engine
from .hardware import HardwareOptions
from .network import LinkOptions, require_numbers
from .pace import Island, Pace
from .ports import ComputePort, EngineOptions, LearnerOptions, Record, Said, each
from .tapes import Opening, Tapes
from .witness import Witness

LONGEST_STORM = 20.0  # faults are drawn for so many times the length of a calm run
_EVEN = {"step_s": 1.0, "speed_spread": 0.0, "jitter": 0.0, "slow_learner": 1.0}  # hardware says it better
_POSITIVE = ("step_s", "slow_learner", "tokens", "horizon_s")
_NATURAL = ("speed_spread", "jitter", "slow_link_bytes_per_s", "fragment_bytes", "fold_s", "merge_s")


class AllReduce(Struct, frozen=True, forbid_unknown_fields=True):
    """What data parallel over several sites adds to every step: a ring all-reduce of all gradients.

    Two thirds of a step hide it (`sim.bandwidth`); what they do not hide makes the step longer.
    """

    sites: int = 2
    bytes_per_s: float = 1e9  # of each site's line, each way
    latency_s: float = 0.0
    bits: float = 16.0  # per gradient
    buckets: int = 40  # the last of so many has nothing left to hide behind

    def __post_init__(self) -> None:
        """ConfigError names the first number that makes no sense."""
        require_numbers("sim.all_reduce", self, ("sites", "bytes_per_s", "bits", "buckets"), ("latency_s",))

    def exposed_s(self, parameters: float, step_s: float) -> float:
        """Return the seconds that a step of so long takes longer."""
        exchange = bandwidth.Exchange(
            "dp", parameters, self.bits, step_s, self.sites, self.latency_s, buckets=self.buckets
        )
        return bandwidth.exposed_s(exchange, 8 * self.bytes_per_s / 1e9)


class SimOptions(Struct, frozen=True, forbid_unknown_fields=True):
    """Section `[sim]`: what compute, network and weather are like."""

    compute: Literal["costs", "tensors"] = "costs"
    step_s: float = 1.0  # inner step of the fastest learner
    speed_spread: float = 0.0  # the slowest learner's step is longer by this share, the others evenly between
    jitter: float = 0.0  # a step's time is uniform within ± this share
    slow_learner: float = 1.0  # factor on the step time of the last learner
    tokens: int = 1000  # per step, where costs stand for tensors
    link: LinkOptions = LinkOptions()  # of every learner
    slow_link_bytes_per_s: float = 0.0  # of the last learner; 0: like the others
    fragment_bytes: float = 1e6  # a payload, where costs stand for tensors
    fold_s: float = 0.0
    merge_s: float = 0.0
    hardware: HardwareOptions | None = None  # slices that fail and return; its learners are `sync.learners`
    all_reduce: AllReduce | None = None  # of a learner that stands for data parallel over several sites
    faults: str = ""  # fault plan to play
    weather: Weather = Weather()  # faults drawn from the seed
    horizon_s: float = 1e7  # a run that is not over by then is given up

    def __post_init__(self) -> None:
        """ConfigError where a number makes no sense, or hardware and steps contradict each other."""
        require_numbers("sim", self, _POSITIVE, _NATURAL)
        if self.jitter >= 1:
            raise ConfigError(f"sim.jitter={self.jitter} would make steps of no length: use less than 1")
        for name, even in _EVEN.items() if self.hardware is not None else ():
            if getattr(self, name) != even:
                raise ConfigError(
                    f"sim.{name}={getattr(self, name)} beside sim.hardware: its own step_s, speed_spread, "
                    "step_jitter and slowdown_… say how long steps take; leave it out of [sim]"
                )

    @property
    def usual_step_s(self) -> float:
        """About how long a step takes."""
        return self.step_s if self.hardware is None else self.hardware.step_s


@dataclass
class Outcome:
    """What a simulated run came to. Shares are of compute time or of tokens."""

    engine: Engine
    witness: Witness
    plan: Plan
    complete: bool
    wall_s: float
    tape: str = ""
    tape_digest: str = ""

    def figures(self) -> dict[str, Any]:
        """Return the figures of a run, from its ledger and its decisions."""
        engine, syncer = self.engine, self.engine.syncer
        table = syncer.ledger.table()
        consumed = max(table["consumed"], 1)
        step_s = _median_step_s(engine)
        learners = [name for name, role in engine.roles.items() if role == "learner"]
        return {
            "complete": self.complete,
            "ticks": syncer.tick,
            "rounds": syncer.rounds_merged,
            "virtual_s": round(engine.now, 6),
            "goodput": round(stepping_share(engine.pace, learners, engine.now), 6),
            "uptime": round(_uptime(engine), 6),
            "rounds_per_step": round(syncer.tick / max(engine.now / step_s, 1e-9), 4),
            "participants": round(self.witness.folded / max(self.witness.rounds, 1), 4),
            "merged_share": round(table["merged"] / consumed, 6),
            "tokens": {key: value for key, value in table.items() if isinstance(value, int)},
            "faults": sum(fault.at_s <= engine.now for fault in self.plan.fault),
            "slices_failed": sum(island.slices.failures for island in engine.pace.islands.values()),
            "events": engine.handled,
            "events_per_s": round(engine.handled / max(self.wall_s, 1e-9)),
            "tape": self.tape,
            "tape_digest": self.tape_digest,
        }


def _median_step_s(engine: Engine) -> float:
    times = sorted(
        options.step_s for name, options in engine.learners.items() if engine.roles[name] == "learner"
    )
    return times[(len(times) - 1) // 2]


def stepping_share(pace: Pace, learners: list[str], now: float) -> float:
    """Return the share of the learners' time, or owned slice time, that went into completed steps."""
    if pace.islands:
        for island in pace.islands.values():
            island.slices.count_to(now)
        owned_s = sum(island.slices.owned_slice_s for island in pace.islands.values())
        return sum(island.useful_slice_s for island in pace.islands.values()) / max(owned_s, 1e-9)
    stepped_s = sum(pace.stepped_s.get(name, 0.0) for name in learners)
    return stepped_s / max(now * len(learners), 1e-9)


def _uptime(engine: Engine) -> float:
    return engine.pace.any_stepping_s / max(engine.now, 1e-9)


def _opening(engine: Engine, settings: dict[str, Any]) -> Callable[[str, m.Machine], Opening]:
    """Return what says how a tape begins. settings: of the whole run."""

    def opening(worker: str, machine: m.Machine) -> Opening:
        assert isinstance(machine, LearnerMachine | SyncerMachine)
        if isinstance(machine, SyncerMachine):
            seed = seed_of(machine, engine.restored)
            return Opening(m.SYNCER, f"{engine.epochs:03d}", {**settings, **seed})
        return Opening(machine.role, machine.incarnation.replace(".", "-"), seed_of(machine))

    return opening


@dataclass(frozen=True)
class Run:
    """What is simulated. `settings`: of the whole run, for the tapes; `make_port`: where tensors take
    part."""

    sync: SyncOptions
    sim: SimOptions
    name: str = "sim"
    seed: int = 0
    shards: int = 64
    settings: dict[str, Any] | None = None
    schema: tuple[m.TensorSpec, ...] = (m.TensorSpec("w", (1,)),)
    make_port: Callable[[str, Said], ComputePort] | None = None
    rows: int = 0  # windows of a full batch, where tensors take part

    @property
    def parameters(self) -> float:
        """Elements of the model; where costs stand for tensors, what its payloads hold in float32."""
        if self.make_port is None:
            return self.sim.fragment_bytes * self.sync.fragments / 4
        return float(sum(math.prod(spec.shape) for spec in self.schema))


def simulate(
    run: Run,
    *,
    folder: Path | None = None,
    watch: Record | None = None,
    remember: bool = True,
    digested: bool = True,
) -> Outcome:
    """Run to the end, or to the horizon.

    folder: where tapes go, None for none; watch: sees every record; remember: the witness keeps what it saw,
    so that memory grows with time; digested: read the tapes once more for their digest.
    """
    witness = Witness(run.sync, remember)
    settings = run.settings or {"sync": to_builtins(run.sync)}
    tapes: Tapes | None = None
    told: list[Record] = [witness.record]
    engine = Engine(
        run.sync,
        EngineOptions(run.seed, run.sim.fragment_bytes, run.sim.fold_s, run.sim.merge_s, run.shards),
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
    names = [f"learner-{number}" for number in range(run.sync.learners)]
    for number, name in enumerate(names):
        engine.add(name, costs_of(run, number), island=island_of(run, number))
    plan = storm(run, names, m.SYNCER)
    play(plan, engine)
    began = time.perf_counter()
    try:
        engine.run(until=run.sim.horizon_s)
    finally:
        if tapes is not None:
            tapes.close()  # also of a run that the witness stopped: they are what one looks at then
    outcome = Outcome(engine, witness, plan, engine.complete, time.perf_counter() - began)
    if tapes is not None:
        outcome.tape = str(tapes.folder)
        outcome.tape_digest = digest(tapes.folder) if digested else ""
    return outcome


def costs_of(run: Run, number: int) -> LearnerOptions:
    """Return the costs of learner `number`: the fastest is the first, what is slow is the last."""
    options, count = run.sim, run.sync.learners
    share = number / (count - 1) if count > 1 else 0.0
    last = number == count - 1
    link = options.link
    if last and options.slow_link_bytes_per_s:
        link = replace(link, bytes_per_s=options.slow_link_bytes_per_s)
    step_s = options.usual_step_s * (1 + options.speed_spread * share)
    step_s *= options.slow_learner if last else 1.0
    exposed_s = options.all_reduce.exposed_s(run.parameters, step_s) if options.all_reduce else 0.0
    return LearnerOptions(step_s, options.jitter, options.tokens, run.rows, exposed_s=exposed_s, link=link)


def island_of(run: Run, number: int) -> Island | None:
    """Return the imagined hardware of learner `number`, if there is any."""
    if run.sim.hardware is None:
        return None
    return Island(replace(run.sim.hardware, learners=run.sync.learners), number, run.seed)


def storm(run: Run, names: list[str], *centre: str) -> Plan:
    """Return the faults of a run: those of its plan, and those drawn. centre: who else may be named."""
    options, expected_s = run.sim, run.sync.steps * run.sim.usual_step_s
    faults = list(load(options.faults).fault) if options.faults else []
    faults += draw(run.seed, names, min(options.horizon_s, LONGEST_STORM * expected_s), options.weather).fault
    unknown = {fault.worker for fault in faults} - {*names, *centre}
    if unknown:
        raise ConfigError(f"sim.faults names {sorted(unknown)}; this run has {[*names, *centre]}")
    return Plan(tuple(sorted(faults, key=lambda fault: fault.at_s)))
