"""The replay that guards the protocol: a tape is enough to make its machine again (appendix E.1).

`verify` gives a fresh machine the recorded events and demands the recorded actions: same events, same
decisions. It needs nothing but the tape, of a live run or a simulated one. The replay that guards the
mathematics is `tape.follow`.

Invariants: it reads no clock; a divergence is reported once, at the first record where it shows, with both
versions.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct

from ..errors import TapeError
from ..protocol import gossip as g
from ..protocol import messages as m
from ..protocol.enrolled import RendezvousState
from ..protocol.learner import LearnerMachine
from ..protocol.peer import PeerMachine
from ..protocol.rendezvous import RendezvousMachine
from ..protocol.roster import Roster
from ..protocol.schedule import SyncOptions
from ..protocol.syncer import SyncerMachine, SyncerState
from .record import Header, Record
from .tape import TapeTail, read, workers


class MachineSeed(Struct):
    """What a machine is made from; a tape's header carries it under `machine`, so that the tape is enough."""

    role: str
    name: str
    run: str = ""
    incarnation: str = ""
    shard: int = -1
    position: int = -1
    address: str = ""  # of a peer
    kept: int = -1
    members: tuple[g.Address, ...] = ()  # of a list that stands in for a rendezvous
    schema: tuple[m.TensorSpec, ...] = ()
    shards: int = 0
    state: SyncerState | None = None  # what a resumed syncer was restored from
    rendezvous: RendezvousState | None = None  # and a rendezvous


AnyMachine = LearnerMachine | SyncerMachine | PeerMachine | RendezvousMachine


def seed_of(machine: AnyMachine, state: SyncerState | RendezvousState | None = None) -> dict[str, Any]:
    """Return what a header must carry so that the machine can be made again; call it before any event."""
    match machine:
        case SyncerMachine():
            assert not isinstance(state, RendezvousState)
            seed = MachineSeed(
                m.SYNCER, m.SYNCER, machine.run, schema=machine.schema, shards=machine.shards, state=state
            )
        case RendezvousMachine():
            assert not isinstance(state, SyncerState)
            seed = MachineSeed(
                g.RENDEZVOUS, g.RENDEZVOUS, machine.run, shards=machine.shards, rendezvous=state
            )
        case PeerMachine():
            seed = MachineSeed(machine.role, machine.name, machine.run, machine.incarnation)
            seed.shard, seed.position = machine.shard, machine.position
            seed.address, seed.kept = machine.address, machine.kept
            seed.members = machine.roster.members if machine.roster is not None else ()
        case LearnerMachine():
            seed = MachineSeed(machine.role, machine.name, machine.run, machine.incarnation)
            seed.shard, seed.position = machine.shard, machine.position
    plain: dict[str, Any] = msgspec.to_builtins(seed)
    for name in (
        "address",
        "kept",
        "members",
        "rendezvous",
    ):  # a tape of learners and a syncer knows nothing of gossip
        if getattr(seed, name) == getattr(MachineSeed("", ""), name):
            del plain[name]
    return {"machine": plain}


def machine_of(header: Header) -> AnyMachine:
    """Return the machine of a tape as it was before its first record."""
    if "machine" not in header.settings:
        raise TapeError(f"the tape of {header.worker} has no machine in its header: it cannot be replayed")
    seed = msgspec.convert(header.settings["machine"], MachineSeed)
    settings = {key: value for key, value in header.settings.items() if key != "machine"}
    match seed.role:
        case m.SYNCER:
            options = msgspec.convert(settings["sync"], SyncOptions)
            machine = SyncerMachine(seed.run, options, seed.schema, settings, seed.shards)
            if seed.state is not None:
                machine.restore(seed.state)
            return machine
        case g.RENDEZVOUS:
            rendezvous = RendezvousMachine(seed.run, g.gossip_of(settings), settings, seed.shards)
            if seed.rendezvous is not None:
                rendezvous.restore(seed.rendezvous)
            return rendezvous
        case "peer":
            peer = PeerMachine(
                seed.name, seed.incarnation, seed.run, seed.address, seed.shard, seed.position, seed.kept
            )
            if seed.members:
                peer.roster = Roster(seed.name, seed.members, settings)
            return peer
        case _:
            return LearnerMachine(
                seed.name, seed.incarnation, seed.run, seed.shard, seed.position, role=seed.role
            )


# ---- verify ----


class Difference(Struct, frozen=True):
    """The first place where a machine decides otherwise than its tape says."""

    worker: str
    record: int
    t: float
    event: str
    recorded: str
    replayed: str


class Verified(Struct, frozen=True):
    """What `verify` found."""

    equal: bool
    records: int
    first_difference: Difference | None = None


_ENCODER = msgspec.json.Encoder(order="deterministic")


def verify(path: str | Path) -> Verified:
    """Replay every tape of a run folder, or one tape. TapeError if a tape is damaged."""
    path = Path(path)
    files = [file.path for file in workers(path)] if path.is_dir() else [path]
    if not files:
        raise TapeError(f"{path} has no tape: give a run folder (the one with `tape/` in it) or a tape file")
    count = 0
    for file in files:
        tape = read(file)
        difference, records = verify_records(tape)
        count += records
        if difference is not None:
            return Verified(False, count, difference)
    return Verified(True, count)


def verify_records(tape: TapeTail) -> tuple[Difference | None, int]:
    """Replay one tape; return the first difference, if any, and the records looked at."""
    records = iter(tape)
    first = next(records, None)
    if first is None:
        return None, 0
    assert tape.header is not None
    machine = machine_of(tape.header)
    worker, count = tape.header.worker, 0
    for record in _chain(first, records):
        count += 1
        replayed = _encode(machine, record)
        recorded = _ENCODER.encode(record.actions)
        if replayed != recorded:
            event = _ENCODER.encode(record.event).decode()
            return Difference(worker, record.i, record.t, event, recorded.decode(), replayed.decode()), count
    return None, count


def _encode(machine: m.Machine, record: Record) -> bytes:
    """Return the machine's decisions as the tape would hold them."""
    try:
        return _ENCODER.encode(tuple(machine.handle(record.t, record.event)))
    except (AssertionError, KeyError, IndexError) as error:
        return _ENCODER.encode(f"the machine fails: {type(error).__name__}: {error}")


def _chain(first: Record, rest: Iterator[Record]) -> Iterator[Record]:
    yield first
    yield from rest
