"""A host in virtual time for gossip: peers and their rendezvous, driven as they are live (GASLoC).

What `sim.engine` is to learners and a syncer. Steps, hardware and the faults of compute are `sim.pace` for
both; the network is `sim.mesh`; a peer's compute port answers an action with an event (`sim.gossip_ports`).

What the port is asked for waits for the end of the step that is on, as a trainer's inbox does, and is done in
the order asked, before the next step begins; it costs no virtual time. Each peer connects to whom it knows.

Invariants: a run is a function of its options and faults; a checkpoint is a copy; a machine has one alarm.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import msgspec
from msgspec import to_builtins

from ..protocol import gossip as g
from ..protocol import messages as m
from ..protocol.enrolled import RendezvousState
from ..protocol.peer import PeerMachine
from ..protocol.rendezvous import RendezvousMachine
from .clock import NEVER, Clock
from .engine import uniform
from .gossip_ports import CostPeer, GossipCosts, GossipPort
from .mesh import Connection, Mesh
from .network import Parcel
from .pace import Island, Pace
from .ports import Host, LearnerOptions, Record

PORT_ACTIONS = (
    g.Offer, g.Take, g.Mix, g.Correct, g.Drop, g.Capture, g.Adopt, g.Submit, g.Gather, g.Average, g.Accept,
    m.Save,
)  # fmt: skip


@dataclass
class Desk:
    """What a peer's process has beside its machine. `known`: whom it keeps a connection to."""

    port: GossipPort
    saved: Any = None
    known: tuple[str, ...] = ()
    queue: deque[tuple[m.Action, Any]] = field(default_factory=deque)  # asked of the port, not done


class GossipEngine:
    """Peers, their rendezvous, their network and their faults. A target for `chaos.plan`."""

    def __init__(
        self,
        options: g.GossipOptions,
        costs: GossipCosts | None = None,
        *,
        run: str = "sim",
        on_record: Record | None = None,
        make_port: Callable[[str], GossipPort] | None = None,
        schema: tuple[m.TensorSpec, ...] = (m.TensorSpec("w", (1,)),),
        settings: dict[str, Any] | None = None,
    ) -> None:
        self.clock, self.mesh = Clock(), Mesh()
        self.options, self.costs = options, costs or GossipCosts()
        self.run_name, self.schema, self.on_record = run, schema, on_record
        self.settings = settings or {"gossip": to_builtins(options)}
        self.hosts: dict[str, Host] = {}
        self.desks: dict[str, Desk] = {}
        self.learners: dict[str, LearnerOptions] = {}  # peers; the name is `sim.pace`'s
        self.journal: dict[str, tuple[int, int]] = {}  # peer -> (shard, position) beside its data
        self.saved: dict[str, tuple[int, Any]] = {}  # peer -> (round, state) of its newest checkpoint
        self.saved_rendezvous: bytes = b""
        self.restored: RendezvousState | None = None  # what the present rendezvous was started from
        self.epochs = 0  # rendezvous processes so far
        self.handled = 0  # events so far
        self.pace = Pace(self, partial(uniform, self.costs.seed))
        self._make_port = make_port
        self._lives = 0
        self._dialing: set[tuple[str, str]] = set()
        self._boot_rendezvous()

    @property
    def now(self) -> float:
        """Virtual seconds since the run's start."""
        return self.clock.now

    @property
    def rendezvous(self) -> RendezvousMachine:
        """The machine of the rendezvous that runs now, or ran last."""
        machine = self.hosts[g.RENDEZVOUS].machine
        assert isinstance(machine, RendezvousMachine)
        return machine

    def peer(self, name: str) -> PeerMachine:
        """Return a peer's machine, dead or alive."""
        machine = self.hosts[name].machine
        assert isinstance(machine, PeerMachine)
        return machine

    def add(
        self,
        name: str,
        options: LearnerOptions | None = None,
        *,
        at: float = 0.0,
        island: Island | None = None,
    ) -> None:
        """A new peer starts its process at this time, or once its island has a slice to run it on."""
        self.learners[name] = options or LearnerOptions()
        self.mesh.lines[name] = self.learners[name].link
        if island is not None:
            self.pace.islands[name] = island
        self.clock.plan(at, self._boot, name)

    def run(self, until: float = NEVER) -> "GossipEngine":
        """Let time pass up to a moment, or until the rendezvous has finished and no fault comes."""
        self.clock.run(until, lambda: self.over)
        return self

    @property
    def complete(self) -> bool:
        """Whether the run has reached its end."""
        finished = self.hosts[g.RENDEZVOUS].finished
        return finished is not None and finished.complete

    @property
    def over(self) -> bool:
        """Whether nothing more will come."""
        finished = self.hosts[g.RENDEZVOUS].finished is not None
        return self.complete or (finished and not self.clock.faults)

    # ---- processes ----

    def _boot(self, name: str) -> None:
        if name == g.RENDEZVOUS:
            self._revive()
            return
        if self._alive(name):
            return
        absent_until = self.pace.absent_until(name)
        if absent_until > self.now:
            if absent_until < NEVER:
                self.at(absent_until, self._boot, name)
            return
        for other, _ in self.mesh.of(name):
            self._lose(name, other, "replaced")
        shard, position = self.journal.get(name, (-1, -1))
        kept, saved = self.saved.get(name, (-1, None))
        incarnation = f"{name}.{self._lives + 1}"
        machine = PeerMachine(name, incarnation, self.run_name, name, shard, position, kept)
        port = self._make_port(name) if self._make_port else CostPeer(self.learners[name].tokens, self.schema)
        self.desks[name] = Desk(port, saved)
        self._host(name, machine).computes = True
        self._dial_later(name, g.RENDEZVOUS, 0.0)

    def _host(self, name: str, machine: m.Machine) -> Host:
        self._lives += 1
        port: Any = self.desks[name].port if name in self.desks else None
        host = self.hosts[name] = Host(name, machine, port, self._lives)
        return host

    def _boot_rendezvous(self) -> None:
        machine = RendezvousMachine(self.run_name, self.options, self.settings, self.costs.shards)
        self.epochs += 1
        self.restored = None
        if self.saved_rendezvous:
            machine.restore(msgspec.json.decode(self.saved_rendezvous, type=RendezvousState))
            self.restored = msgspec.json.decode(self.saved_rendezvous, type=RendezvousState)
        host = self._host(g.RENDEZVOUS, machine)
        self.at(self.now, self.handle, host, m.Woke(), None)

    def _revive(self) -> None:
        if not self._alive(g.RENDEZVOUS):
            for other, _ in self.mesh.of(g.RENDEZVOUS):
                self._lose(g.RENDEZVOUS, other, "replaced")
            self._boot_rendezvous()

    def _alive(self, name: str) -> bool:
        host = self.hosts.get(name)
        return host is not None and host.alive

    # ---- what `sim.pace` needs ----

    def at(self, at: float, work: Callable[..., None], *arguments: Any) -> None:
        """Do this at that time."""
        self.clock.at(at, work, *arguments)

    def handle(self, host: Host, event: m.Event, payload: Any) -> None:
        """Let a machine decide, record it, then carry out what it decided."""
        if not host.alive:
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

    def land(self, host: Host) -> None:
        """Do what the port was asked for, in order."""
        desk = self.desks.get(host.name)
        while desk is not None and desk.queue and host.alive and not host.frozen:
            action, payload = desk.queue.popleft()
            if isinstance(action, m.Save):
                self.saved[host.name] = action.round, desk.port.save(action.round)
                continue
            event = desk.port.act(action, payload)
            if event is not None:
                self.handle(host, event, None)

    def perish(self, host: Host) -> None:
        """The process dies for want of slices; it starts again when there are some."""
        self._kill(host.name)
        self._boot(host.name)

    # ---- actions ----

    def _act(self, host: Host, action: m.Action, payload: Any) -> None:
        match action:
            case m.Send(to=to, message=message):
                self._send(host, to, message)
            case m.Wake(at=at):
                host.alarm += 1
                self.at(at, self._ring, host, host.alarm)
            case m.Hold():
                host.allowed = False
            case m.Resume():
                self.land(host)  # before the step that may begin now
                host.allowed = True
                self.pace.begin(host)
            case m.Save() if host.name == g.RENDEZVOUS:
                self.saved_rendezvous = msgspec.json.encode(self.rendezvous.snapshot())
            case g.Know(members=members):
                self.desks[host.name].known = names = tuple(member.name for member in members)
                for name in names:
                    self._dial_later(host.name, name, 0.0)
            case m.Prepare(settings=settings, shard=shard, position=position):
                cost_s = self.learners[host.name].prepare_s
                self.at(self.now + cost_s, self._prepare, host, settings, shard, position)
            case m.Stop(reason=reason):
                host.stopping = reason
                if not host.stepping:
                    self.at(self.now, self.handle, host, m.StopRequested(reason), None)
            case m.Close(worker=worker):
                self._lose(host.name, worker, "closed")
            case m.Finish():
                self._end(host, action)
            case _ if isinstance(action, PORT_ACTIONS):
                self.desks[host.name].queue.append((action, payload))
                if not host.stepping:
                    self.at(self.now, self._land_between_steps, host)

    def _land_between_steps(self, host: Host) -> None:
        if not host.stepping and host is self.hosts[host.name]:
            self.land(host)

    def _prepare(self, host: Host, settings: dict[str, Any], shard: int, position: int) -> None:
        if host.alive:
            desk = self.desks[host.name]
            self.handle(host, desk.port.prepare(settings, shard, position, desk.saved), None)

    def _ring(self, host: Host, alarm: int) -> None:
        if alarm == host.alarm:
            self.handle(host, m.Woke(), None)

    def _end(self, host: Host, finish: m.Finish) -> None:
        """A process ends in order: what it has sent arrives, then its connections close."""
        self.pace.gone(host)
        host.finished = finish
        for other, connection in self.mesh.of(host.name):
            line = self.mesh.line(host.name, other)
            self._lose_later(line.latency_s + line.notice_death_s, host.name, other, connection, "closed")

    # ---- the network ----

    def _send(self, host: Host, to: str, message: m.AnyMessage) -> None:
        connection = self.mesh.between(host.name, to)
        if not connection.up:
            return
        bulk = isinstance(message, g.Model | g.State | g.Final | g.Mean)
        payload = self.desks[host.name].port.payload(to, message) if bulk else None
        parcel = Parcel(host.name, to, message, payload, connection.number)
        if not bulk:
            there = self.now + self.mesh.latency_s(host.name, to)
            self.at(self.mesh.in_order(parcel, bulk=False, at=there), self._deliver, parcel)
            return
        nbytes = float(getattr(payload, "nbytes", self.costs.payload_bytes(message, self.options)))
        begins, left = self.mesh.leaves(self.now, host.name, nbytes)
        self.at(begins, self._carry, parcel, nbytes, left)

    def _carry(self, parcel: Parcel, nbytes: float, left: float) -> None:
        """A payload begins to leave."""
        sender, receiver = parcel.sender, parcel.receiver
        self.mesh.bytes_sent[sender] = self.mesh.bytes_sent.get(sender, 0.0) + nbytes
        there = self.mesh.arrives(self.now, receiver, nbytes, left) + self.mesh.latency_s(sender, receiver)
        self.at(self.mesh.in_order(parcel, bulk=True, at=there), self._deliver, parcel)

    def _deliver(self, parcel: Parcel) -> None:
        if self.mesh.passes(parcel):
            received = m.Received(parcel.sender, parcel.message)
            self.handle(self.hosts[parcel.receiver], received, parcel.payload)

    def _wants(self, name: str, other: str) -> bool:
        """Whether a process keeps up a connection to another."""
        return name != g.RENDEZVOUS and (other == g.RENDEZVOUS or other in self.desks[name].known)

    def _dial_later(self, name: str, other: str, delay_s: float) -> None:
        if (name, other) not in self._dialing and not self.mesh.between(name, other).up:
            self._dialing.add((name, other))
            self.at(self.now + delay_s, self._dial, name, other)

    def _dial(self, name: str, other: str) -> None:
        """Try to connect; again after a while if nobody answers."""
        self._dialing.discard((name, other))
        if not self._alive(name) or not self._wants(name, other) or self.mesh.between(name, other).up:
            return
        line = self.mesh.line(name, other)
        if self._deaf(name) or self._deaf(other) or self.mesh.broken(name, other):
            self._dial_later(name, other, line.retry_s)
            return
        self.mesh.connect(name, other)
        for here, there in ((other, name), (name, other)):
            self.at(
                self.now + line.latency_s, self._connected, here, there, self.mesh.between(name, other).number
            )

    def _connected(self, here: str, there: str, number: int) -> None:
        connection = self.mesh.between(here, there)
        if connection.up and connection.number == number:
            self.handle(self.hosts[here], m.Connected(there), None)

    def _lose(self, one: str, other: str, reason: str) -> None:
        """Both ends learn now that the connection is gone; who wants it dials again."""
        if not self.mesh.lose(one, other):
            return
        for here, there in ((one, other), (other, one)):
            self.at(self.now, self.handle, self.hosts[here], m.Disconnected(there, reason), None)
            if self._wants(here, there):
                self._dial_later(here, there, self.mesh.line(here, there).retry_s)

    def _lose_later(self, delay_s: float, one: str, other: str, connection: Connection, reason: str) -> None:
        self.at(self.now + delay_s, self._notice, one, other, connection.number, reason)

    def _notice(self, one: str, other: str, number: int, reason: str) -> None:
        broken = self.mesh.broken(one, other) or self._deaf(one) or self._deaf(other)
        if self.mesh.between(one, other).number == number and broken:
            self._lose(one, other, reason)

    def _deaf(self, name: str) -> bool:
        return not self._alive(name) or self.hosts[name].frozen

    # ---- faults, as `chaos.plan` asks for them ----

    def kill(self, name: str, at: float) -> None:
        """SIGKILL: the process is gone, with what it had not sent. Also the rendezvous."""
        self.clock.plan(at, self._kill, _named(name))

    def restart(self, name: str, at: float) -> None:
        """Start a process anew: another incarnation, from its newest checkpoint, its data position known."""
        self.clock.plan(at, self._boot, _named(name))

    def resume_syncer(self, at: float) -> None:
        """Start the rendezvous again from what it saved last."""
        self.clock.plan(at, self._revive)

    def stop(self, name: str, at: float) -> None:
        """SIGTERM: an orderly stop."""
        self.clock.plan(at, self._stop, _named(name))

    def pause(self, name: str, at: float, until: float = NEVER) -> None:
        """A peer's compute stands still; its courier goes on."""
        self._between(at, until, self._pause, self._go_on, name)

    def freeze(self, name: str, at: float, until: float = NEVER) -> None:
        """SIGSTOP of a peer: compute and courier stand still."""
        self._between(at, until, self._freeze, self._thaw, name)

    def slow(self, name: str, factor: float, at: float, until: float = NEVER) -> None:
        """Steps that begin from now on take `factor` times as long."""
        self._between(at, until, partial(self._slow, factor), partial(self._slow, 1.0), name)

    def partition(self, name: str, at: float, until: float = NEVER) -> None:
        """Nothing passes between this peer and anybody else."""
        self._between(at, until, self._cut, self._heal, name)

    def _between(
        self, at: float, until: float, begin: Callable[[str], None], end: Callable[[str], None], name: str
    ) -> None:
        self.clock.plan(at, begin, name)
        if until < NEVER:
            self.clock.plan(until, end, name)

    def _kill(self, name: str) -> None:
        if not self._alive(name):
            return
        host = self.hosts[name]
        self.pace.gone(host)
        host.life = 0
        for other, connection in self.mesh.of(name):
            line = self.mesh.line(name, other)
            self._lose_later(line.notice_death_s, name, other, connection, "reset")

    def _stop(self, name: str) -> None:
        if not self._alive(name):
            return
        host = self.hosts[name]
        if host.stepping and not host.paused:
            host.stopping = "stopped"
        else:
            self.handle(host, m.StopRequested("stopped"), None)

    def _pause(self, name: str) -> None:
        if self._alive(name):
            self.pace.pause(self.hosts[name])

    def _go_on(self, name: str) -> None:
        if self._alive(name):
            self.pace.go_on(self.hosts[name])

    def _freeze(self, name: str) -> None:
        if not self._alive(name):
            return
        self._pause(name)
        self.hosts[name].frozen = True
        self._silent(name)

    def _thaw(self, name: str) -> None:
        host = self.hosts.get(name)
        if host is None or not host.alive or not host.frozen:
            return
        host.frozen, backlog = False, host.backlog
        host.backlog = []
        for event, payload in backlog:
            self.handle(host, event, payload)
        self._land_between_steps(host)
        self._go_on(name)

    def _slow(self, factor: float, name: str) -> None:
        self.pace.set_slow(name, factor)

    def _cut(self, name: str) -> None:
        self.mesh.cut.add(name)
        self._silent(name)

    def _silent(self, name: str) -> None:
        """Nothing comes from there: partners will notice."""
        for other, connection in self.mesh.of(name):
            line = self.mesh.line(name, other)
            self._lose_later(line.notice_cut_s, name, other, connection, "keepalive")

    def _heal(self, name: str) -> None:
        self.mesh.cut.discard(name)
        for _, connection in self.mesh.of(name):
            held, connection.held = connection.held, []
            for parcel in held:
                self._deliver(parcel)  # at once: nothing that is still on its way may overtake it


def _named(name: str) -> str:
    """Return the worker a fault plan means: it calls whoever the others depend on the syncer."""
    return g.RENDEZVOUS if name == m.SYNCER else name
