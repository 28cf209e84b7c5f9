"""A whole gossip run in memory: machines, a network of fixed delays, compute ports that count and answer."""

import heapq
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from archipel.protocol import gossip as g
from archipel.protocol import messages as m
from archipel.protocol.peer import PeerMachine
from archipel.protocol.rendezvous import RendezvousMachine
from archipel.protocol.topology import SCHEMES

SCHEMA = (m.TensorSpec("w", (2,)),)


@dataclass
class Costs:
    """Seconds; one peer's own."""

    step_s: float = 1.0
    transfer_s: float = 3.0


@dataclass
class Rig:
    options: g.GossipOptions
    costs: dict[str, Costs] = field(default_factory=dict)
    latency_s: float = 0.01
    now: float = 0.0
    log: list[tuple[float, str, m.Event, list[m.Action]]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.heap: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self.count = 0
        self.machines: dict[str, PeerMachine | RendezvousMachine] = {}
        self.allowed: dict[str, bool] = {}
        self.stepping: dict[str, bool] = {}
        self.steps: dict[str, int] = {}
        self.tokens = 0  # of all steps of all lives
        self.alarms: dict[str, int] = {}
        self.lives: dict[str, int] = {}
        self.finished: dict[str, m.Finish] = {}
        self.drawn: dict[str, tuple[int, int]] = {}  # killed peer -> shard and position in it
        self.open: set[frozenset[str]] = set()
        self.rendezvous()

    def at(self, at: float, work: Callable[..., None], *arguments: Any) -> None:
        self.count += 1
        heapq.heappush(self.heap, (max(at, self.now), self.count, work, arguments))

    def rendezvous(self, state: Any = None) -> RendezvousMachine:
        settings = {"gossip": {k: getattr(self.options, k) for k in self.options.__struct_fields__}}
        machine = RendezvousMachine("test", self.options, settings, shards=64)
        if state is not None:
            machine.restore(state)
        self._start(g.RENDEZVOUS, machine)
        self.at(self.now, self.handle, g.RENDEZVOUS, m.Woke())  # as every host says when it starts
        return machine

    def peer(self, name: str, **facts: Any) -> None:
        life = self.lives.get(name, 0) + 1
        machine = PeerMachine(name, f"{name}.{life}", "test", f"at-{name}", **facts)
        self._start(name, machine)
        self.at(self.now + self.latency_s, self._link, name, g.RENDEZVOUS)

    def _start(self, name: str, machine: Any) -> None:
        self.machines[name] = machine
        self.lives[name] = self.lives.get(name, 0) + 1
        self.steps[name] = 0
        self.allowed[name] = self.stepping[name] = False
        self.finished.pop(name, None)
        self.alarms[name] = self.alarms.get(name, 0) + 1

    def _link(self, one: str, other: str) -> None:
        pair = frozenset((one, other))
        if other == g.RENDEZVOUS and self.alive(one) and not self.alive(other):
            self.at(self.now + 1.0, self._link, one, other)  # clients knock for ever
        if one == other or pair in self.open or not (self.alive(one) and self.alive(other)):
            return
        self.open.add(pair)
        for here, there in ((one, other), (other, one)):
            self.handle(here, m.Connected(there))

    def alive(self, name: str) -> bool:
        return name in self.machines and name not in self.finished

    def kill(self, name: str) -> None:
        self.machines.pop(name)
        self.lives[name] += 1
        self._cut(name)

    def _cut(self, name: str) -> None:
        for pair in [pair for pair in self.open if name in pair]:
            self.open.discard(pair)
            [other] = pair - {name}
            self.at(self.now + self.latency_s, self.handle, other, m.Disconnected(name, "killed"))

    def handle(self, name: str, event: m.Event) -> None:
        if not self.alive(name):
            return
        actions = self.machines[name].handle(self.now, event)
        self.log.append((self.now, name, event, actions))
        for action in actions:
            self.act(name, action)

    def act(self, name: str, action: m.Action) -> None:
        match action:
            case m.Send(to=to, message=message):
                if frozenset((name, to)) in self.open:
                    mine, theirs = self.costs.get(name, Costs()), self.costs.get(to, Costs())
                    bulk = max(mine.transfer_s, theirs.transfer_s) if self.carries(message) else 0.0
                    life = (self.lives[name], self.lives[to])
                    self.at(self.now + self.latency_s + bulk, self._deliver, name, to, message, life)
            case m.Wake(at=at):
                self.alarms[name] += 1
                self.at(at, self._ring, name, self.alarms[name])
            case m.Prepare():
                self.at(self.now, self.handle, name, m.Prepared(SCHEMA))
            case m.Resume():
                self.allowed[name] = True
                self._begin(name)
            case m.Hold():
                self.allowed[name] = False
            case g.Know(members=members):
                for member in members:
                    self.at(self.now + self.latency_s, self._link, name, member.name)
            case m.Finish():
                self.finished[name] = action
                self.at(self.now + 2 * self.latency_s, self._cut, name)  # goodbyes still arrive
            case m.Stop(reason=reason):
                self.at(self.now, self.handle, name, m.StopRequested(reason))
            case _:
                if (event := self.answer(action)) is not None:
                    self.at(self.now, self.handle, name, event)

    @staticmethod
    def carries(message: m.Message) -> bool:
        return isinstance(message, g.Model | g.State | g.Final | g.Mean)

    @staticmethod
    def answer(action: m.Action) -> m.Event | None:
        match action:
            case g.Offer(round=number):
                return g.Offered(number)
            case g.Mix(round=number, workers=workers):
                return g.Mixed(number, 1.0 if workers else -1.0, 100.0)
            case g.Correct(round=number, worker=worker):
                return g.Corrected(number, worker)
            case g.Capture(round=number, worker=worker):
                return g.Captured(number, worker)
            case g.Adopt(round=number):
                return g.Adopted(number)
            case g.Submit(attempt=attempt):
                return g.Submitted(attempt, 1.0)
            case g.Gather(attempt=attempt, worker=worker):
                return g.Gathered(attempt, worker)
            case g.Average(attempt=attempt):
                return g.Averaged(attempt, "digest", {})
            case _:
                return None

    def _ring(self, name: str, alarm: int) -> None:
        if self.alarms.get(name) == alarm:
            self.handle(name, m.Woke())

    def _deliver(self, name: str, to: str, message: m.Message, life: tuple[int, int]) -> None:
        if (self.lives[name], self.lives[to]) == life and frozenset((name, to)) in self.open:
            self.handle(to, m.Received(name, message))

    def _begin(self, name: str) -> None:
        if self.allowed[name] and not self.stepping[name]:
            self.stepping[name] = True
            cost_s = self.costs.get(name, Costs()).step_s
            self.at(self.now + cost_s, self._stepped, name, self.lives[name], cost_s)

    def _stepped(self, name: str, life: int, cost_s: float) -> None:
        if self.lives[name] != life or not self.alive(name):
            return
        self.stepping[name] = False
        self.steps[name] += 1
        self.tokens += 10
        tick = self.machines[name].schedule_tick  # type: ignore[union-attr]
        self.handle(name, m.StepCompleted(self.steps[name], 10, cost_s, (), tick))
        self._begin(name)

    def run(self, until: float = 1e6) -> "Rig":
        while self.heap and self.heap[0][0] <= until and g.RENDEZVOUS not in self.finished:
            self.run_one()
        if until < 1e6:
            self.now = max(self.now, until)
        return self

    def run_one(self) -> None:
        """Do what comes next."""
        self.now, _, work, arguments = heapq.heappop(self.heap)
        work(*arguments)

    def actions(self, kind: type, name: str | None = None) -> list[tuple[float, str, Any]]:
        return [
            (t, who, action)
            for t, who, _, actions in self.log
            for action in actions
            if isinstance(action, kind) and name in (None, who)
        ]


def cut(rig: Rig, one: str, other: str) -> None:
    pair = frozenset((one, other))
    if pair in rig.open:
        rig.open.discard(pair)
        for here, there in ((one, other), (other, one)):
            rig.at(rig.now + 0.01, rig.handle, here, m.Disconnected(there, "cut"))


def random_options(rng: random.Random, n: int, **fixed: Any) -> g.GossipOptions:
    """Return options of a storm's run with n peers, but for what is fixed."""
    drawn = {
        "rounds": rng.randint(4, 25),
        "local_steps": rng.choice([1, 3, 8]),
        "scheme": rng.choice(SCHEMES),
        "adapt": rng.random() < 0.7,
        "timeout_s_max": rng.choice([2.0, 10.0, 40.0]),
    }
    return g.GossipOptions(peers=n, **{**drawn, **fixed})
