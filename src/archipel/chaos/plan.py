"""Fault plans: what breaks, whom it hits, when, and for how long (chaos engineering, section 3.3).

A plan is a TOML file of `[[fault]]` tables, or drawn from a seed. It is played on a target that offers the
faults by name: the simulator's engine in virtual time, or processes on this machine. Times are seconds from
the run's start.

    [[fault]]
    kind = "slow"          # kill | freeze | pause | slow | partition | stop
    worker = "learner-1"   # or "syncer"
    at_s = 12.0
    for_s = 5.0            # then it is restarted, thawed, healed …; 0: for good
    factor = 3.0           # of `slow` only: its steps take so many times as long

Invariants: a plan is a value, sorted by time; drawing depends on nothing but its arguments.
"""

import math
import tomllib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Literal, Protocol

import msgspec
from msgspec import Struct

from ..errors import ConfigError

FOREVER = math.inf
SYNCER = "syncer"
Kind = Literal["kill", "freeze", "pause", "slow", "partition", "stop"]


class Fault(Struct, frozen=True, forbid_unknown_fields=True):
    """One fault. `factor`: of a slow one's step time; a plan that is loaded must give it, and not as 1."""

    kind: Kind
    worker: str
    at_s: float
    for_s: float = 0.0
    factor: float = 1.0

    @property
    def until_s(self) -> float:
        """When it is over."""
        return self.at_s + self.for_s if self.for_s else FOREVER


class Plan(Struct, frozen=True, forbid_unknown_fields=True):
    """Faults, by time."""

    fault: tuple[Fault, ...] = ()


class Target(Protocol):
    """What can be broken. `sim.engine.Engine` is one."""

    def kill(self, name: str, at: float) -> None: ...

    def restart(self, name: str, at: float) -> None: ...

    def freeze(self, name: str, at: float, until: float) -> None: ...

    def pause(self, name: str, at: float, until: float) -> None: ...

    def slow(self, name: str, factor: float, at: float, until: float) -> None: ...

    def partition(self, name: str, at: float, until: float) -> None: ...

    def stop(self, name: str, at: float) -> None: ...

    def resume_syncer(self, at: float) -> None: ...


def load(path: str | Path) -> Plan:
    """Return the plan in a TOML file. Raises ConfigError that names the rule a fault breaks."""
    try:
        plan = msgspec.convert(tomllib.loads(Path(path).read_text(encoding="utf-8")), Plan)
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}; give the path of a fault plan") from None
    except (tomllib.TOMLDecodeError, msgspec.ValidationError) as error:
        raise ConfigError(f"{path} is not a fault plan: {error}; see the table in docs/guide.md") from None
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"{path} is not a fault plan: byte {error.start} is no UTF-8 text; give a fault plan"
        ) from None
    for number, fault in enumerate(plan.fault):
        if reason := _broken(fault):
            raise ConfigError(f"{path}: fault {number} ({fault.kind} of {fault.worker}): {reason}")
    return Plan(tuple(sorted(plan.fault, key=lambda fault: fault.at_s)))


def _broken(fault: Fault) -> str:
    if not (0 <= fault.at_s < FOREVER and 0 <= fault.for_s < FOREVER):
        return f"at_s={fault.at_s}, for_s={fault.for_s} must be finite and not negative"
    if fault.kind == "slow" and not 0 < fault.factor < FOREVER:
        return f"factor={fault.factor} must be positive: 3.0 makes a step take three times as long"
    if fault.kind == "slow" and fault.factor == 1:
        return "factor=1.0 changes nothing: 3.0 makes a step take three times as long"
    if fault.worker == SYNCER and fault.kind not in ("kill", "stop"):
        return "a syncer can be killed or stopped; slow or cut off the learners instead"
    return ""


def play(plan: Plan, target: Target) -> None:
    """Schedule every fault, and its end, on a target."""
    for fault in plan.fault:
        name, at, until = fault.worker, fault.at_s, fault.until_s
        match fault.kind:
            case "kill" | "stop":
                (target.kill if fault.kind == "kill" else target.stop)(name, at)
                if until < FOREVER and name == SYNCER:
                    target.resume_syncer(until)
                elif until < FOREVER:
                    target.restart(name, until)
            case "freeze":
                target.freeze(name, at, until)
            case "pause":
                target.pause(name, at, until)
            case "slow":
                target.slow(name, fault.factor, at, until)
            case "partition":
                target.partition(name, at, until)


class Weather(Struct, frozen=True, forbid_unknown_fields=True):
    """How stormy it is: mean seconds between two faults of a learner of each kind; 0: never."""

    kill_s: float = 0.0
    freeze_s: float = 0.0
    slow_s: float = 0.0
    partition_s: float = 0.0
    syncer_kill_s: float = 0.0
    mean_for_s: float = 10.0

    def __post_init__(self) -> None:
        """ConfigError names the first number that is no time."""
        for name in self.__struct_fields__:
            value = getattr(self, name)
            if not 0 <= value < FOREVER or (value == 0 and name == "mean_for_s"):
                least = "above 0" if name == "mean_for_s" else "of 0 (never) or more"
                raise ConfigError(f"sim.weather.{name}={value} makes no sense: use finite seconds {least}")


def draw(seed: int, workers: Sequence[str], horizon_s: float, weather: Weather) -> Plan:
    """Return a plan of Poisson faults with exponential durations over a horizon; a pure function."""
    rates = {"kill": weather.kill_s, "freeze": weather.freeze_s, "slow": weather.slow_s}
    rates["partition"] = weather.partition_s
    faults = [
        fault
        for worker in workers
        for kind, mean_s in rates.items()
        for fault in _poisson(seed, worker, kind, mean_s, horizon_s, weather.mean_for_s)
    ]
    faults += _poisson(seed, SYNCER, "kill", weather.syncer_kill_s, horizon_s, weather.mean_for_s)
    return Plan(tuple(sorted(faults, key=lambda fault: (fault.at_s, fault.worker, fault.kind))))


def _poisson(
    seed: int, worker: str, kind: str, mean_s: float, horizon_s: float, for_s: float
) -> Iterator[Fault]:
    if mean_s <= 0:
        return
    at_s, number = 0.0, 0
    while True:
        at_s += -mean_s * math.log1p(-_uniform(seed, worker, kind, number))
        if at_s >= horizon_s:
            return
        duration_s = max(1e-3, -for_s * math.log1p(-_uniform(seed, worker, kind, number + 1)))
        factor = 2.0 + 3.0 * _uniform(seed, worker, kind, number + 2) if kind == "slow" else 1.0
        fault = {"kind": kind, "worker": worker, "at_s": at_s, "for_s": duration_s, "factor": factor}
        yield msgspec.convert(fault, Fault)
        at_s += duration_s  # a worker that is down cannot go down
        number += 3


def _uniform(seed: int, worker: str, kind: str, number: int) -> float:
    """Return a number in [0, 1) that depends on nothing but the arguments (splitmix64 over their letters)."""
    value = seed & 0xFFFFFFFFFFFFFFFF
    for part in (*worker.encode(), 0, *kind.encode(), 0, *number.to_bytes(8, "little")):
        value = ((value ^ part) * 0x100000001B3 + 0x9E3779B97F4A7C15) & 0xFFFFFFFFFFFFFFFF
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        value = ((value ^ (value >> shift)) * factor) & 0xFFFFFFFFFFFFFFFF
    return (value ^ (value >> 31)) / 2**64
