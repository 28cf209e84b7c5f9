"""A learner's inner steps in virtual time: when they begin and end, and what its imagined hardware does to
them.

At the end of a step, in this order: the port steps and copies, `StepCompleted` is handled, the updates that
wait are applied, then the next step starts unless the learner holds or stops. A learner with hardware
(`Island`) may also

    lose a step in which a chip fails, and every slice that failed in it, and stop for `downscale_s`;
    stop for `upscale_s` when slices come back (`downscale_s` when capacity is taken away);
    die when no slice is left, and start its process anew when there is one again;

and with fewer slices a step carries proportionally fewer rows, at least one. The protocol is told of none of
this: it sees steps that come late, smaller batches, and deaths, as it would live.

Invariants: a lost step reaches neither port nor machine; what was left over by rounding a batch is made up
for in later ones.
"""

import math
from collections.abc import Callable
from typing import Any, Protocol

from ..protocol import messages as m
from ..protocol.learner import LearnerMachine
from ..protocol.peer import PeerMachine
from .hardware import HardwareOptions, StepTimes
from .ports import Host, LearnerOptions
from .slices import Slices


class Island:
    """One learner's imagined hardware: its slices and how long its steps take."""

    def __init__(self, options: HardwareOptions, learner: int, seed: int) -> None:
        self.slices = Slices(options, learner, seed)
        self.times = StepTimes(options, seed, learner)
        self.useful_slice_s = 0.0  # slice time computing in steps that were completed
        self._owed = 0.0  # rows that rounding has kept back so far

    def rows(self, full: int) -> int | None:
        """Return the rows of a step with the slices that live, None for a full batch."""
        slices = self.slices
        if slices.live == slices.full:
            return None
        exact = full * slices.live / slices.full + self._owed
        rows = max(1, round(exact))
        self._owed = max(exact - rows, -1.0)
        return rows


class World(Protocol):
    """What steps need of the host that drives them."""

    learners: dict[str, LearnerOptions]
    journal: dict[str, tuple[int, int]]  # learner -> (shard, position) beside its data

    @property
    def now(self) -> float: ...

    def at(self, at: float, work: Callable[..., None], *arguments: Any) -> None: ...

    def handle(self, host: Host, event: m.Event, payload: Any) -> None: ...

    def land(self, host: Host) -> None: ...

    def perish(self, host: Host) -> None:
        """The process dies for want of slices; it starts again when there are some."""
        ...


class Pace:
    """Begins and ends the steps of all learners, and counts the time they spend in them."""

    def __init__(self, world: World, uniform: Callable[[str, int], float]) -> None:
        self.islands: dict[str, Island] = {}
        self.stepped_s: dict[str, float] = {}  # learner -> compute time of steps that were completed
        self.any_stepping_s = 0.0  # time in which any learner was in a step that is not lost
        self._world = world
        self._uniform = uniform  # (learner, step) -> [0, 1)
        self._slow: dict[str, float] = {}
        self._stepping, self._stepping_since = 0, 0.0  # learners in a step, and since when so many

    def begin(self, host: Host) -> None:
        """Start a step if the learner may and nothing keeps it."""
        if host.stepping or not host.allowed or host.paused or host.frozen or host.stopping is not None:
            return
        if not host.alive or not host.computes:
            return
        island = self.islands.get(host.name)
        if island is not None and not self._ready(host, island):
            return
        host.stepping = True
        assert isinstance(host.machine, LearnerMachine | PeerMachine)
        host.tick = host.machine.schedule_tick
        options = self._world.learners[host.name]
        host.compute_s = self._compute_s(host, island, options)
        host.step_s = host.compute_s + options.exposed_s
        host.lost = island is not None and not island.slices.survive(host.step_s)
        host.began_at = self._world.now
        self._end_in(host, host.step_s)

    def _compute_s(self, host: Host, island: Island | None, options: LearnerOptions) -> float:
        if island is not None:
            step_s = island.times.draw(self._world.now)
        elif options.jitter:
            step_s = options.step_s * (1 + options.jitter * (2 * self._uniform(host.name, host.steps) - 1))
        else:
            step_s = options.step_s
        return step_s * self._slow.get(host.name, 1.0)

    def _end_in(self, host: Host, left_s: float) -> None:
        host.run += 1
        host.ends_at = self._world.now + left_s
        if not host.lost:
            self._count_stepping(1)
        self._world.at(host.ends_at, self._boundary, host, host.run)

    def _boundary(self, host: Host, run: int) -> None:
        """A step is over."""
        if run != host.run or not host.alive or host.paused or host.frozen:
            return
        host.stepping = False
        if host.lost:
            self._lose(host)
            return
        self._count_stepping(-1)
        host.steps += 1
        name, world = host.name, self._world
        self.stepped_s[name] = self.stepped_s.get(name, 0.0) + host.compute_s
        island, rows = self.islands.get(name), None
        if island is not None:
            island.useful_slice_s += host.compute_s * island.slices.live
            options = world.learners[name]
            rows = island.rows(options.rows or options.tokens)
        tokens, copied = host.port.step(host.steps, host.tick, rows)
        took_s = world.now - host.began_at
        world.handle(host, m.StepCompleted(host.steps, tokens, took_s, copied, host.tick), None)
        machine = host.machine
        assert isinstance(machine, LearnerMachine | PeerMachine)
        world.journal[name] = (machine.shard, machine.position + machine.tokens)
        world.land(host)
        if host.stopping is not None:
            world.handle(host, m.StopRequested(host.stopping), None)
        self.begin(host)

    def _count_stepping(self, change: int) -> None:
        now = self._world.now
        if self._stepping:
            self.any_stepping_s += now - self._stepping_since
        self._stepping += change
        self._stepping_since = now

    # ---- hardware ----

    def _ready(self, host: Host, island: Island) -> bool:
        """Whether the hardware is there and is not being reconfigured; if it is to be, begin with that."""
        now = self._world.now
        if host.stopped_until > now:
            return False
        stop_s = island.slices.admit(now)
        if not island.slices.live:
            self._world.perish(host)
            return False
        if stop_s is not None:
            self._stop(host, island, stop_s)
        return stop_s is None

    def _lose(self, host: Host) -> None:
        """A chip failed in the step that is over: its work is lost."""
        island, world = self.islands[host.name], self._world
        rest = host.step_s * island.slices.failing_hz - island.slices.exposure
        stop_s = island.slices.fail(rest, world.now)
        world.land(host)
        if host.stopping is not None:
            world.handle(host, m.StopRequested(host.stopping), None)
        elif not island.slices.live:
            world.perish(host)
        else:
            self._stop(host, island, stop_s)

    def _stop(self, host: Host, island: Island, seconds: float) -> None:
        host.stopped_until = self._world.now + seconds
        self._world.at(host.stopped_until, self._stopped, host, island, seconds)

    def _stopped(self, host: Host, island: Island, seconds: float) -> None:
        if host.alive:
            island.slices.stopped(seconds, self._world.now)
            self.begin(host)

    def absent_until(self, name: str) -> float:
        """Return when the learner has a slice to run on: now (or earlier), later, or never (infinite)."""
        island = self.islands.get(name)
        if island is None:
            return -math.inf
        island.slices.admit(self._world.now)  # what is there when it starts stops nobody
        return -math.inf if island.slices.live else island.slices.next_s

    # ---- faults ----

    def pause(self, host: Host) -> None:
        """Compute stands still; the rest of the step waits."""
        if host.paused:
            return
        self.gone(host)
        host.paused = True
        host.left_s = max(host.ends_at - self._world.now, 0.0) if host.stepping else 0.0

    def go_on(self, host: Host) -> None:
        """Compute goes on where it stood."""
        host.paused = False
        if host.stepping:
            self._end_in(host, host.left_s)
        else:
            self.begin(host)

    def gone(self, host: Host) -> None:
        """Nobody is in this learner's step any more."""
        if host.stepping and not host.paused and not host.lost:
            self._count_stepping(-1)

    def set_slow(self, name: str, factor: float) -> None:
        """Steps that begin from now on take `factor` times as long."""
        self._slow[name] = factor
