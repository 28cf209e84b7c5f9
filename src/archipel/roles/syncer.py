"""The syncer process: the machine, a server, one thread for tensors and one for checkpoints.

The machine's thread decides and sends; the tensor thread folds and merges in the order asked and posts the
outcome; checkpoints are written from values that later merges replace but do not change, so that no round
waits for a disk. A checkpoint holds of every fragment the version that the machine knows, not one whose word
is still on its way: tensors, ledger and owed rounds are of one moment.
"""

import logging
import os
import platform
import queue
import secrets
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec
import torch
from safetensors import SafetensorError, safe_open

from .. import config as configuration
from ..errors import CheckpointError, ConfigError, DataError, ModelError, PayloadError
from ..protocol import messages as m
from ..protocol.syncer import SyncerMachine, SyncerState
from ..runtime import checkpoint, security, wire
from ..runtime.buffers import Buffers, mapped
from ..runtime.host import Host, decode_envelope
from ..runtime.transport import Server
from ..tape.replay import seed_of
from ..tape.tape import Header, TapeWriter, tape_path
from ..train import data, models
from ..train.compute import FragmentState, OuterState
from ..train.options import ModelOptions, fit
from ..train.parameters import schema_of, synchronised
from .result import conclude

log = logging.getLogger("archipel")


@dataclass(frozen=True)
class Snapshot:
    """What one checkpoint holds, taken at one moment."""

    round: int
    states: list[FragmentState]
    machine: bytes


class SyncerRole:
    """The transport's sink and the host's port of the syncer."""

    def __init__(
        self,
        machine: SyncerMachine,
        outer: OuterState,
        tape: TapeWriter,
        directory: Path,
        buffers: Buffers,
    ) -> None:
        """`buffers`: where `outer` has its room, and pushes theirs."""
        self.machine = machine
        self.outer = outer
        self.tape = tape
        self.host = Host(machine, self, tape, name=m.SYNCER)
        self.server: Server | None = None
        self.keep = 3
        self.saved: Snapshot | None = None  # the newest one taken, while it is written; the last one for good
        self._directory = directory
        self._buffers = buffers
        self._work: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._saves: queue.SimpleQueue[Snapshot | None] = queue.SimpleQueue()
        # By fragment: the state before a merge of which the machine has not heard yet.
        self._unheard: dict[int, FragmentState] = {}
        self._failed = False  # whether the newest checkpoint could not be written
        self._encoded: dict[int, tuple[int, Any, int]] = {}  # fragment -> (version, bytes, checksum)
        self._threads = [
            threading.Thread(target=self._compute, name="archipel-tensors", daemon=True),
            threading.Thread(target=self._write_checkpoints, name="archipel-checkpoints", daemon=True),
        ]

    # ---- the network's words, from its threads ----

    def connected(self, worker: str) -> None:
        self.host.post(m.Connected(worker))

    def disconnected(self, worker: str, reason: str) -> None:
        self.host.post(m.Disconnected(worker, reason))

    def received(self, worker: str, message: bytes, payload: memoryview | None, seconds: float) -> None:
        try:
            self.host.deliver(worker, message, payload)
        except PayloadError as error:
            log.warning("ignored worker=%s reason=%r", worker, str(error))
            self.discard(payload)

    def allocate(self, worker: str, message: bytes, length: int) -> memoryview:
        push = decode_envelope(message).message
        if not isinstance(push, m.Push) or not 0 <= push.fragment < len(self.outer.fragments):
            raise PayloadError("only a push of one of the run's fragments carries a payload")
        round_ = self.machine.rounds.flying.get(push.fragment)
        if round_ is None or worker not in round_.pulling:
            # Memory is given for at most `pulls_max` pushes, those that were asked for.
            raise PayloadError(f"push of fragment {push.fragment} was not asked for, or its round is over")
        expected = self.outer.push_bytes(push.fragment, full=push.full)
        if length != expected:
            raise PayloadError(
                f"push of fragment {push.fragment}: {length} bytes declared, {expected} expected: "
                "the sender's model, sync.push_codec or sync.codec_block differ from the run's"
            )
        return memoryview(self._buffers.take(length))

    def sent(self, worker: str, key: Any, bytes_: int, seconds: float) -> None:
        pass

    # ---- what the host wants done ----

    def send(self, to: str, message: m.Message, envelope: bytes) -> None:
        assert self.server is not None
        if isinstance(message, m.Update):
            payload, digest = self._update(message.fragment, message.version)
            self.server.send_bulk(to, message.fragment, envelope, payload, digest)
        else:
            self.server.send(to, envelope)

    def _update(self, fragment: int, version: int) -> tuple[Any, int]:
        """Return a version as bytes with its checksum, made once for all who get it."""
        held = self._encoded.get(fragment)
        if held is None or held[0] != version:
            payload = self.outer.update(fragment, version)
            held = self._encoded[fragment] = (version, payload, wire.checksum(payload))
        return held[1], held[2]

    def act(self, action: m.Action, payload: Any | None) -> None:
        match action:
            case m.Fold():
                self._work.put(lambda: self._fold(action, payload))
            case m.Merge():
                self._work.put(lambda: self._merge(action))
            case m.Discard(fragment=fragment):
                self._work.put(lambda: self.outer.discard(fragment))
            case m.Save(round=number):
                self._save(number)
            case m.Close(worker=worker, reason=reason):
                assert self.server is not None
                self.server.close(worker, reason)

    def discard(self, payload: Any) -> None:
        pass

    # ---- tensors ----

    def _compute(self) -> None:
        while (work := self._work.get()) is not None:
            try:
                work()
            except Exception as error:  # out of memory, say: a round that nobody works on would never end
                log.exception("tensor work failed")
                self.host.fail(error)
                return
            del work  # and the payload with it: memory that the next push may have

    def _fold(self, fold: m.Fold, payload: Any) -> None:
        try:
            self.outer.fold(fold.fragment, payload, fold.weight, base=fold.base, full=fold.full)
        except PayloadError as error:
            self.host.post(m.Rejected(fold.fragment, fold.worker, str(error)))
        else:
            self.host.post(m.Folded(fold.fragment, fold.worker))

    def _merge(self, merge: m.Merge) -> None:
        # First, so that whoever sees the new state finds this one, too.
        self._unheard[merge.fragment] = replace(self.outer.states[merge.fragment], before=None)
        try:
            self.outer.merge(merge.fragment, merge.version)
        except PayloadError as error:
            del self._unheard[merge.fragment]
            self.host.post(m.MergeFailed(merge.fragment, str(error)))
        else:
            digest = self.outer.fragment_digest(merge.fragment)
            merged = m.Merged(merge.fragment, merge.version, digest)
            self.host.call(lambda: self._merged(merged))

    def _merged(self, merged: m.Merged) -> None:
        """Tell the machine, on its thread: from here on the new version is the one it knows."""
        del self._unheard[merged.fragment]
        self.host.handle(merged)

    def _known(self) -> list[FragmentState]:
        """Return the state of every fragment at the version that the machine knows. On its thread."""
        # The list is read before what is unheard: a merge that begins in between changes neither answer.
        held = enumerate(list(self.outer.states))
        return [replace(self._unheard.get(fragment, state), before=None) for fragment, state in held]

    # ---- checkpoints ----

    def _save(self, number: int) -> None:
        states, state = self._known(), self.machine.state()
        assert state.versions == [held.version for held in states], (state.versions, number)
        self.saved = Snapshot(number, states, msgspec.json.encode(state))
        self._saves.put(self.saved)

    def _write_checkpoints(self) -> None:
        while self._write_newest():
            pass

    def _write_newest(self) -> bool:
        """Wait for a snapshot and write it; return whether more may come.

        Nothing of it is held when this returns: what later merges replace may go.
        """
        waiting = [self._saves.get()]
        while not self._saves.empty():
            waiting.append(self._saves.get())
        # A newer one takes the place of those that were not begun.
        newest = next((snapshot for snapshot in reversed(waiting) if snapshot is not None), None)
        if newest is not None:
            self._write(newest)
        return None not in waiting

    def _write(self, snapshot: Snapshot) -> None:
        """Write a checkpoint. One that fails is a line in the log; `run` tries the last one again."""
        self._failed = True
        began = time.monotonic()
        try:
            path = checkpoint.save(
                self._directory,
                snapshot.round,
                self.outer.arrays(snapshot.states),
                snapshot.machine,
                run=self.machine.run,
                keep=self.keep,
            )
        except CheckpointError as error:
            log.error("%s", error)  # training goes on; the older checkpoints are as they were
        except Exception:
            log.exception("checkpoint failed round=%d", snapshot.round)
        else:
            self._failed = False
            log.info("checkpoint path=%s seconds=%.2f", path.name, time.monotonic() - began)
        # The machine is finished before it asks for the last one, which is kept for the result.
        if self.saved is snapshot and self.machine.phase != "finished":
            self.saved = None  # what later merges replace is not held any longer

    # ---- life ----

    def run(self) -> m.Finish:
        """Serve until the machine finishes; let its last words leave and its last checkpoint be written."""
        assert self.server is not None
        for thread in self._threads:
            thread.start()
        self.host.post(m.Woke())  # the machine's first word: it saves, and says whom it waits for
        finish = self.host.run()
        self._work.put(None)
        self._saves.put(None)
        for thread in self._threads:
            thread.join()
        if self._failed and self.saved is not None:
            log.warning("trying to write the last checkpoint again round=%d", self.saved.round)
            self._write(self.saved)
        self._unheard.clear()  # `saved` has what the run ends with
        self.server.stop(2.0)
        self.tape.close(finish.reason)
        return finish


def renew(machine: SyncerMachine, epoch: int) -> SyncerState | None:
    """Put a fresh machine after an epoch that another took, if one did; return what it was made from.

    That one left no checkpoint, but learners may hold its versions.
    """
    if not epoch:
        return None
    state = machine.state()
    state.epoch = epoch
    machine.restore(state)
    return state


def restore(
    machine: SyncerMachine, outer: OuterState, found: checkpoint.Checkpoint, epoch: int
) -> SyncerState:
    """Put a machine and its tensors where a checkpoint was taken; return what the machine was made from.

    epoch: the newest that was taken, by a syncer that died before its first checkpoint, say.
    """
    try:
        state = msgspec.json.decode(found.state, type=SyncerState)
    except msgspec.DecodeError as error:
        raise CheckpointError(f"{found.path}: its state does not fit this release: {error}") from None
    if len(state.versions) != len(outer.fragments):
        raise CheckpointError(
            f"{found.path} has {len(state.versions)} fragments, sync.fragments={len(outer.fragments)}: "
            "resume with the options of the run that wrote it"
        )
    outer.restore(found.tensors("weights"), found.tensors("momentum"), state.versions)
    state.epoch = max(state.epoch, epoch)
    machine.restore(state)
    return state


# ---- opening ----


@dataclass(frozen=True)
class Opening:
    """How a syncer process was asked to start."""

    out: Path  # run folder
    listen: str = "127.0.0.1:0"
    tls: str = ""
    resume: bool = False
    init: str = ""  # safetensors file of initial weights
    address_file: str = ""


def initial_weights(
    config: configuration.Config, init: str
) -> tuple[tuple[m.TensorSpec, ...], dict[str, Any], ModelOptions]:
    """Return the schema, the weights by name and the completed model options a run starts from."""
    options = config.model
    if init:
        schema, weights = _read_weights(Path(init))
        return schema, weights, _fit_to(options, config, schema)
    if not options.vocabulary or not options.sequence:
        options = fit(options, config.data, data.load(config.data).vocabulary)
    found = synchronised(models.build(options), config.sync)
    weights = {name: tensor.detach().float().numpy() for name, (tensor, _) in found.items()}
    return schema_of(found), weights, options


def _fit_to(
    options: ModelOptions, config: configuration.Config, schema: tuple[m.TensorSpec, ...]
) -> ModelOptions:
    """Return the model options with what was left to the data taken from given weights."""
    entries = [spec.shape[0] for spec in schema if spec.name.endswith("embed_tokens.weight")]
    return msgspec.structs.replace(
        options,
        vocabulary=options.vocabulary or (entries[0] if entries else 0),
        sequence=options.sequence or config.data.sequence,
    )


def data_digest(config: configuration.Config, init: str) -> str:
    """Return what the learners' data must be, or "" where this host does not have it."""
    if init:
        return ""  # the weights may be of a user's own model, with data of its own
    try:
        return data.load(msgspec.structs.replace(config.data, verify=False)).digest
    except DataError as error:
        log.info("no data here, so that learners are not compared with it reason=%r", str(error))
        return ""


def _read_weights(path: Path) -> tuple[tuple[m.TensorSpec, ...], dict[str, Any]]:
    try:
        with safe_open(path, framework="pt") as opened:
            buffers = set((opened.metadata() or {}).get("buffers", "").split())
            tensors = {name: opened.get_tensor(name).float() for name in opened.keys()}  # noqa: SIM118
    except (OSError, SafetensorError) as error:
        raise ModelError(f"--init {path}: {error}; give a file written by archipel.save_weights") from None
    for name, tensor in tensors.items():
        if not tensor.isfinite().all():
            raise ModelError(f"--init {path}: tensor {name!r} holds NaN or Inf; give weights of a sound run")
    schema = tuple(
        m.TensorSpec(name, tuple(tensor.shape), "buffer" if name in buffers else "parameter")
        for name, tensor in tensors.items()
    )
    return schema, {name: tensor.numpy() for name, tensor in tensors.items()}


def seeded(config: configuration.Config) -> configuration.Config:
    """Return the configuration with the run's seed added to those of model and data, as learners adopt it."""
    model = msgspec.structs.replace(config.model, seed=config.model.seed + config.run.seed)
    shuffled = msgspec.structs.replace(config.data, seed=config.data.seed + config.run.seed)
    return msgspec.structs.replace(config, model=model, data=shuffled)


def open_syncer(config: configuration.Config, opening: Opening) -> SyncerRole:
    """Return a syncer that listens: fresh, or resumed from the newest valid checkpoint of its run folder."""
    if config.gossip is not None:
        raise ConfigError("a run with [gossip] has no syncer: start `archipel rendezvous`, or drop [gossip]")
    directory = opening.out / "checkpoints"
    found = checkpoint.load_newest(directory, run=config.run.name)
    for skipped in found.skipped if found else ():
        log.warning("checkpoint passed over path=%s reason=%r", skipped.path, skipped.reason)
    if found is not None and not opening.resume:
        raise CheckpointError(
            f"{directory} holds a checkpoint of round {found.step}: "
            "--resume goes on from it, another --out starts afresh"
        )
    if found is None and opening.resume:
        log.warning(
            "nothing to resume, starting afresh: %s holds no checkpoint; is --out the folder of the run?",
            directory.resolve(),
        )
    config = seeded(config)
    schema, weights, model = initial_weights(config, opening.init)
    config = msgspec.structs.replace(config, model=model)
    outer = OuterState(schema, config.sync)
    # Of one round: pushes on their way, two sums, new weights and momentum.
    buffers = Buffers(kept=config.sync.pulls_max + 4, make=mapped)
    outer.room = buffers.floats
    machine = SyncerMachine(
        run=config.run.name,
        options=config.sync,
        schema=schema,
        settings=configuration.settings_of(config, data_digest=data_digest(config, opening.init)),
        shards=config.data.shards,
    )
    epoch = checkpoint.last_epoch(opening.out)
    if found is None:
        outer.begin(weights)
        state = renew(machine, epoch)
    else:
        weights.clear()
        state = restore(machine, outer, found, epoch)
        log.info("resumed path=%s tick=%d digest=%s", found.path.name, machine.tick, outer.digest())
    init = str(Path(opening.init).resolve()) if opening.init else ""
    environment = {**_sizes(outer), "init": init, "weights": outer.digest()}
    tape = _tape(config, opening.out, {**machine.settings, **seed_of(machine, state)}, environment)
    role = SyncerRole(machine, outer, tape, directory, buffers)
    role.keep = config.checkpoint.keep
    # Before anybody is answered: the first checkpoint comes later, and may fail.
    checkpoint.take_epoch(opening.out, machine.epoch)
    role.server = _listen(role, config, opening)
    return role


def _tape(
    config: configuration.Config, out: Path, settings: dict[str, Any], environment: dict[str, Any]
) -> TapeWriter:
    incarnation = secrets.token_hex(4)
    header = Header(
        run=config.run.name,
        worker=m.SYNCER,
        role=m.SYNCER,
        incarnation=incarnation,
        started=time.time(),
        settings=settings,
        environment={
            "torch": str(torch.__version__),
            "threads": torch.get_num_threads(),
            "cpu": torch.backends.cpu.get_cpu_capability(),
            "python": platform.python_version(),
            "host": platform.node(),
            "pid": os.getpid(),
            **environment,
        },
    )
    return TapeWriter(tape_path(out, m.SYNCER, incarnation), header)


def _sizes(outer: OuterState) -> dict[str, Any]:
    """Return the payload bytes of each fragment, so that a tape tells how much has travelled."""
    fragments = range(len(outer.fragments))
    return {
        "push_bytes": [outer.push_bytes(fragment, full=False) for fragment in fragments],
        "update_bytes": [outer.update_bytes(fragment) for fragment in fragments],
    }


def _listen(role: SyncerRole, config: configuration.Config, opening: Opening) -> Server:
    secured = security.load(opening.tls, "syncer") if opening.tls else None
    if warning := security.warn_if_open(opening.listen, secured):
        log.warning("%s", warning)
    server = Server(role, config.network, listen=opening.listen, run=config.run.name, security=secured)
    role.server = server
    address = server.start()
    log.info("listening address=%s run=%s tick=%d", address, config.run.name, role.machine.tick)
    leave_address(opening.address_file, address)
    return server


def leave_address(file: str, address: str) -> None:
    """Write the address really bound where somebody waits for it, if anybody does."""
    if file:
        path = Path(file)
        path.with_suffix(".tmp").write_text(address)
        path.with_suffix(".tmp").rename(path)


def serve(config: configuration.Config, opening: Opening) -> m.Finish:
    """Run a syncer to its end; SIGTERM and Ctrl-C save and stop. Leaves `syncer.json` and the model."""
    opening.out.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(1)  # several threads only spin against the learners' (docs/guide.md)
    with checkpoint.lease(opening.out):
        role = open_syncer(config, opening)
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda n, _: role.host.post(m.StopRequested(signal.Signals(n).name)))
        finish = role.run()
        states = role.saved.states if role.saved is not None else role.outer.states
        conclude(role.machine, role.outer, states, out=opening.out, finish=finish)
    return finish
