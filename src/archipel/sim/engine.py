"""A host in virtual time: the machines of a whole run, driven by one heap of events.

The machines are those that run live (DESIGN.md, section 1); this host supplies a virtual network and clock,
and asks a compute port for steps, copies and merges. Where the port knows costs only, time passes; where it
holds tensors (`ports.ComputePort`), the run trains.

Learners' steps, and the hardware they run on, are in `sim.pace`. An update waits for the end of a step; a
learner that is not stepping applies at once.

Invariants: a run is a function of its options and faults: events at one instant are handled in the order they
were asked for; `now` never decreases; a machine has one alarm; the newest `Apply` of a fragment replaces one
that waits.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from msgspec import to_builtins

from ..protocol import messages as m
from ..protocol.learner import LearnerMachine
from ..protocol.schedule import SyncOptions
from ..protocol.syncer import SyncerMachine, SyncerState
from .clock import NEVER, Clock
from .network import Channel, Parcel
from .pace import Island, Pace
from .ports import ComputePort, CostPort, EngineOptions, Host, LearnerOptions, Record, Said


class Engine:
    """Workers, their network and their faults. `schema`: of the model every learner builds."""

    def __init__(
        self,
        sync: SyncOptions,
        options: EngineOptions | None = None,
        *,
        run: str = "sim",
        on_record: Record | None = None,
        make_port: Callable[[str, Said], ComputePort] | None = None,
        schema: tuple[m.TensorSpec, ...] = (m.TensorSpec("w", (1,)),),
        settings: dict[str, Any] | None = None,
    ) -> None:
        self.clock = Clock()
        self.at = self.clock.at
        self.sync = sync
        self.options = options or EngineOptions()
        self.run_name = run
        self.schema = schema
        self.settings = settings or {"sync": to_builtins(sync)}
        self.on_record = on_record
        self.hosts: dict[str, Host] = {}
        self.learners: dict[str, LearnerOptions] = {}
        self.roles: dict[str, str] = {}
        self.channels: dict[str, Channel] = {}
        self.saved: SyncerState | None = None
        self.restored: SyncerState | None = None  # what the syncer that runs now was started from
        self.epochs = 0  # syncer processes so far
        self.handled = 0  # events so far
        self.journal: dict[str, tuple[int, int]] = {}  # learner -> (shard, position) beside its data
        self.pace = Pace(self, partial(uniform, self.options.seed))
        self._make_port = make_port
        self._lives = 0
        self._said: list[m.Event] = []
        self._ended = False  # the syncer that runs now, or ran last, has finished
        self._boot_syncer(None)

    @property
    def now(self) -> float:
        """Virtual seconds since the run's start."""
        return self.clock.now

    # ---- workers ----

    @property
    def syncer(self) -> SyncerMachine:
        """The machine of the syncer that runs now, or ran last."""
        machine = self.hosts[m.SYNCER].machine
        assert isinstance(machine, SyncerMachine)
        return machine

    def learner(self, name: str) -> LearnerMachine:
        """Return a learner's machine, dead or alive."""
        machine = self.hosts[name].machine
        assert isinstance(machine, LearnerMachine)
        return machine

    def add(
        self,
        name: str,
        options: LearnerOptions | None = None,
        *,
        at: float = 0.0,
        role: str = "learner",
        island: Island | None = None,
    ) -> None:
        """A new worker starts its process at this time, or once its island has a slice to run it on."""
        self.learners[name] = options or LearnerOptions()
        self.roles[name] = role
        self.channels[name] = Channel(name, self.learners[name].link)
        if island is not None:
            self.pace.islands[name] = island
        self._plan(at, self._boot, name)

    def _port(self, name: str) -> ComputePort:
        if self._make_port is not None:
            return self._make_port(name, self._said.append)
        tokens = self.learners[name].tokens if name in self.learners else 0
        return CostPort(self._said.append, self.schema, tokens)

    def _host(self, name: str, machine: m.Machine) -> Host:
        self._lives += 1
        host = self.hosts[name] = Host(name, machine, self._port(name), self._lives)
        return host

    def _boot(self, name: str) -> None:
        if self._alive(name):
            return
        absent_until = self.pace.absent_until(name)
        if absent_until > self.now:
            if absent_until < NEVER:
                self.at(absent_until, self._boot, name)
            return
        self._lose(self.channels[name], "replaced")
        shard, position = self.journal.get(name, (-1, -1))
        host = self._host(name, LearnerMachine(name, f"{name}.{self._lives + 1}", self.run_name, shard,
                                               position, role=self.roles[name]))  # fmt: skip
        host.computes = self.roles[name] != "observer"
        self.at(self.now, self._dial, name, self.hosts[name].life)

    def _boot_syncer(self, state: SyncerState | None) -> None:
        machine = SyncerMachine(self.run_name, self.sync, self.schema, self.settings, self.options.shards)
        self.epochs, self.restored, self._ended = self.epochs + 1, state, False
        if state is not None:
            machine.restore(state)
        host = self._host(m.SYNCER, machine)
        self.at(self.now, self.handle, host, m.Woke(), None)

    def _alive(self, name: str) -> bool:
        host = self.hosts.get(name)
        return host is not None and host.alive

    # ---- faults ----

    def kill(self, name: str, at: float) -> None:
        """SIGKILL: the process is gone, with what it had not sent. Also the syncer."""
        self._plan(at, self._kill, name)

    def restart(self, name: str, at: float) -> None:
        """Start a learner's process anew: another incarnation, its data position known."""
        self._plan(at, self._boot, name)

    def pause(self, name: str, at: float, until: float = NEVER) -> None:
        """A learner's compute stands still; its courier goes on."""
        self._plan(at, self._pause, name)
        if until < NEVER:
            self._plan(until, self._go_on, name)

    def freeze(self, name: str, at: float, until: float = NEVER) -> None:
        """SIGSTOP of a learner: compute and courier stand still."""
        self._plan(at, self._freeze, name)
        if until < NEVER:
            self._plan(until, self._thaw, name)

    def slow(self, name: str, factor: float, at: float, until: float = NEVER) -> None:
        """Steps that begin from now on take `factor` times as long."""
        self._plan(at, self.pace.set_slow, name, factor)
        if until < NEVER:
            self._plan(until, self.pace.set_slow, name, 1.0)

    def partition(self, name: str, at: float, until: float = NEVER) -> None:
        """Nothing passes between this learner and the syncer."""
        self._plan(at, self._cut, name)
        if until < NEVER:
            self._plan(until, self._heal, name)

    def stop(self, name: str, at: float) -> None:
        """SIGTERM: an orderly stop. Also the syncer."""
        self._plan(at, self._stop, name)

    def resume_syncer(self, at: float) -> None:
        """Start the syncer again from what it saved last."""
        self._plan(at, self._revive)

    # ---- running ----

    def run(self, until: float = NEVER, events: int = 10**9) -> "Engine":
        """Handle events until this time, this many, or until the syncer has finished and no fault comes."""
        last = self.handled + events
        self.clock.run(until, lambda: self.handled >= last or (self._ended and self._over()))
        return self

    def _over(self) -> bool:
        return self.complete or (self._ended and not self.clock.faults)

    @property
    def complete(self) -> bool:
        """Whether the run has reached its end."""
        finished = self.hosts[m.SYNCER].finished
        return finished is not None and finished.complete

    def finish(self, horizon_s: float = 1e6) -> m.Finish:
        """Run until the syncer has finished; return what it said. Fails beyond the horizon."""
        self.run(until=horizon_s)
        finished = self.hosts[m.SYNCER].finished
        assert finished is not None, f"no end by {horizon_s} s: tick {self.syncer.tick} of {self.sync.steps}"
        return finished

    def _plan(self, at: float, work: Callable[..., None], *arguments: Any) -> None:
        self.clock.plan(at, self._planned, work, arguments)

    def _planned(self, work: Callable[..., None], arguments: tuple[Any, ...]) -> None:
        booting = work in (self._boot, self._revive, self.pace.set_slow, self._cut, self._heal)
        if booting or self._alive(arguments[0]):
            work(*arguments)

    def handle(self, host: Host, event: m.Event, payload: Any) -> None:
        """Let a machine decide, record it, then carry out what it decided."""
        if host.life == 0 or host.finished is not None:
            return
        if host.frozen:
            host.backlog.append((event, payload))
            return
        self.handled += 1
        actions = host.machine.handle(self.now, event)
        if self.on_record is not None:
            self.on_record(host.name, self.now, event, actions)
        for action in actions:
            self._act(host, action, payload)

    def _act(self, host: Host, action: m.Action, payload: Any) -> None:
        match action:
            case m.Send(to=to, message=message):
                self._send(host, to, message)
            case m.Copy(fragments=fragments):
                host.port.copy(fragments)
            case m.Apply(fragment=fragment, version=version):
                host.pending.pop(fragment, None)
                host.pending[fragment] = (version, payload)
                if not host.stepping:
                    self.land(host)
            case m.Wake(at=at):
                host.alarm += 1
                self.at(at, self._ring, host, host.alarm)
            case m.Fold():
                self._work(host, self.options.fold_s, host.port.fold, action, payload)
            case m.Merge(fragment=fragment, version=version):
                self._work(host, self.options.merge_s, host.port.merge, fragment, version)
            case m.Discard(fragment=fragment):
                host.port.discard(fragment)
            case m.Hold():
                host.allowed = False
            case m.Resume():
                host.allowed = True
                self.pace.begin(host)
            case _:
                self._act_rarely(host, action)

    def _act_rarely(self, host: Host, action: m.Action) -> None:
        match action:
            case m.Prepare(settings=settings, shard=shard, position=position):
                cost_s = self.learners[host.name].prepare_s
                self._work(host, cost_s, host.port.prepare, settings, shard, position)
            case m.Stop(reason=reason):
                host.stopping = reason
                if not host.stepping:
                    self.at(self.now, self.handle, host, m.StopRequested(reason), None)
            case m.Close(worker=worker):
                self._lose(self.channels[worker if worker in self.channels else host.name], "closed")
            case m.Save(round=number):
                host.port.save(number)
                assert isinstance(host.machine, SyncerMachine)
                self.saved = host.machine.state()
            case m.Finish():
                self._end(host, action)

    def _ring(self, host: Host, alarm: int) -> None:
        if alarm == host.alarm:
            self.handle(host, m.Woke(), None)

    def _work(self, host: Host, cost_s: float, call: Callable[..., None], *arguments: Any) -> None:
        """Have the port do something once the time it takes is over, after what it does already."""
        host.busy_until = max(host.busy_until, self.now) + cost_s
        self.at(host.busy_until, self._done, host, call, arguments)

    def _done(self, host: Host, call: Callable[..., None], arguments: tuple[Any, ...]) -> None:
        """Let the port do it, and the machine hear of it at once: neither is ever ahead of the other."""
        if host.life == 0 or host.finished is not None:
            return
        self._said.clear()
        call(*arguments)
        for event in tuple(self._said):
            self.handle(host, event, None)

    def land(self, host: Host) -> None:
        """Apply what waits, oldest request first."""
        while host.pending:
            fragment, (version, payload) = next(iter(host.pending.items()))
            del host.pending[fragment]
            host.port.apply(fragment, version, payload)
            self.handle(host, m.Applied(fragment, version, host.steps), None)

    # ---- the network ----

    def _send(self, host: Host, to: str, message: m.AnyMessage) -> None:
        channel = self.channels[host.name if to == m.SYNCER else to]
        if not channel.up:
            return
        payload, nbytes = None, 0.0
        match message:
            case m.Push(fragment=fragment, step=step, full=full):
                payload, nbytes = self._sized(host.port.snapshot(fragment, step, full=full))
            case m.Update(fragment=fragment, version=version):
                payload, nbytes = self._sized(host.port.payload(fragment, version))
        parcel = Parcel(host.name, to, message, payload, channel.connection)
        self.at(channel.send(self.now, parcel, nbytes), self._deliver, channel, parcel)

    def _sized(self, payload: Any) -> tuple[Any, float]:
        """Return a payload with its bytes: its own if it holds any."""
        return payload, float(getattr(payload, "nbytes", self.options.fragment_bytes))

    def _deliver(self, channel: Channel, parcel: Parcel) -> None:
        if channel.passes(parcel):
            receiver = self.hosts[parcel.receiver]
            self.handle(receiver, m.Received(parcel.sender, parcel.message), parcel.payload)

    def _dial(self, name: str, life: int) -> None:
        """Try to connect; again after a while if nobody answers."""
        host, channel = self.hosts[name], self.channels[name]
        if host.life != life or host.finished is not None or channel.up:
            return
        if host.frozen or channel.cut or not self._alive(m.SYNCER):
            self.at(self.now + channel.link.retry_s, self._dial, name, life)
            return
        channel.connect()
        self.handle(self.hosts[m.SYNCER], m.Connected(name), None)
        self.handle(host, m.Connected(m.SYNCER), None)

    def _lose(self, channel: Channel, reason: str) -> None:
        """Both ends learn now that the connection is gone; a learner that lives dials again."""
        if not channel.up:
            return
        channel.lose()
        learner = self.hosts[channel.learner]
        self.at(self.now, self.handle, self.hosts[m.SYNCER], m.Disconnected(channel.learner, reason), None)
        self.at(self.now, self.handle, learner, m.Disconnected(m.SYNCER, reason), None)
        self.at(self.now + channel.link.retry_s, self._dial, channel.learner, learner.life)

    def _lose_later(self, channel: Channel, delay_s: float, reason: str) -> None:
        self.at(self.now + delay_s, self._notice, channel, channel.connection, reason)

    def _notice(self, channel: Channel, connection: int, reason: str) -> None:
        broken = channel.cut or self._deaf(channel.learner) or self._deaf(m.SYNCER)
        if channel.connection == connection and broken:
            self._lose(channel, reason)

    def _deaf(self, name: str) -> bool:
        return not self._alive(name) or self.hosts[name].frozen

    def _end(self, host: Host, finish: m.Finish) -> None:
        """A process ends in order: what it has sent arrives, then its channels close."""
        host.finished = finish
        self._ended = self._ended or host.name == m.SYNCER
        mine: Sequence[Channel] = list(self.channels.values())
        for channel in mine if host.name == m.SYNCER else [self.channels[host.name]]:
            self._lose_later(channel, channel.link.latency_s + channel.link.notice_death_s, "closed")

    # ---- what the fault functions do ----

    def _kill(self, name: str) -> None:
        if not self._alive(name):
            return
        host = self.hosts[name]
        self.pace.gone(host)
        host.life = 0
        for channel in self.channels.values():
            if name in (m.SYNCER, channel.learner):
                self._lose_later(channel, channel.link.notice_death_s, "reset")

    def perish(self, host: Host) -> None:
        """The process dies for want of slices; it starts again when there are some."""
        self._kill(host.name)
        self._boot(host.name)

    def _pause(self, name: str) -> None:
        self.pace.pause(self.hosts[name])

    def _go_on(self, name: str) -> None:
        self.pace.go_on(self.hosts[name])

    def _freeze(self, name: str) -> None:
        self._pause(name)
        self.hosts[name].frozen = True
        self._lose_later(self.channels[name], self.channels[name].link.notice_cut_s, "keepalive")

    def _thaw(self, name: str) -> None:
        host = self.hosts[name]
        host.frozen, backlog = False, host.backlog
        host.backlog = []
        for event, payload in backlog:
            self.handle(host, event, payload)
        self._go_on(name)

    def _cut(self, name: str) -> None:
        self.channels[name].cut = True
        self._lose_later(self.channels[name], self.channels[name].link.notice_cut_s, "keepalive")

    def _heal(self, name: str) -> None:
        channel = self.channels[name]
        for parcel in channel.heal():
            self._deliver(channel, parcel)  # at once: nothing that is still on its way may overtake it

    def _stop(self, name: str) -> None:
        host = self.hosts[name]
        if host.stepping and not host.paused:
            host.stopping = "stopped"
        else:
            self.handle(host, m.StopRequested("stopped"), None)

    def _revive(self) -> None:
        if self._alive(m.SYNCER):
            return
        for channel in self.channels.values():
            self._lose(channel, "replaced")
        self._boot_syncer(self.saved)


def uniform(seed: int, name: str, number: int) -> float:
    """Return a number in [0, 1) that depends on nothing but the arguments (splitmix64 over them)."""
    value = seed * 0x9E3779B97F4A7C15 + number * 0xD1B54A32D192ED03
    for letter in name:
        value = (value ^ ord(letter)) * 0x100000001B3
    value &= 0xFFFFFFFFFFFFFFFF
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        value = ((value ^ (value >> shift)) * factor) & 0xFFFFFFFFFFFFFFFF
    return (value ^ (value >> 31)) / 2**64
