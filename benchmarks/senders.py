"""Synthetic learners against a real syncer: what `transport.py` and `memory.py` put their load on it with.

The syncer is `archipel syncer` in its own process, started from given weights. A sender is a learner without
a trainer: `LearnerMachine`, `Host`, `Client` and tape as in a courier, and numpy buffers in place of shared
memory. Its steps cost nothing and come when told, so that a round (steps reported, tick closed, pushes
pulled, merged, update landed at all) is all that is measured. Several senders share a process, one thread of
decisions each.
"""

import multiprocessing
import os
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np

from archipel.config import dump, load
from archipel.errors import PayloadError
from archipel.numerics import codec
from archipel.protocol import messages as m
from archipel.protocol.learner import LearnerMachine
from archipel.protocol.schedule import SyncOptions, options_of
from archipel.runtime import security
from archipel.runtime.buffers import Buffers
from archipel.runtime.courier import BUFFERS_KEPT
from archipel.runtime.dialing import Client
from archipel.runtime.host import Host, decode_envelope
from archipel.runtime.wire import NetworkOptions
from archipel.tape.replay import seed_of
from archipel.tape.tape import Header, TapeWriter, tape_path

WAIT_S = 60.0  # for anything that must happen; a benchmark that hangs says so
COLUMNS = 4096
TOKENS = 1000  # of a step


@dataclass(frozen=True)
class Load:
    """What is run: `fragments` of `fragment_bytes` each as float32, `senders` of them in `processes`."""

    fragment_bytes: int
    fragments: int
    senders: int
    processes: int
    push_codec: str = "float32"
    update_codec: str = "float32"
    tls: str = ""  # folder of certificates; "": plain

    @property
    def numel(self) -> int:
        """Elements of a fragment: whole rows, where there is more than one."""
        numel = self.fragment_bytes // 4
        return max(numel // COLUMNS, 1) * min(numel, COLUMNS)

    @property
    def shape(self) -> tuple[int, int]:
        """Shape of the one tensor in each fragment."""
        columns = min(self.numel, COLUMNS)
        return (self.numel // columns, columns)

    @property
    def schema(self) -> tuple[m.TensorSpec, ...]:
        """What senders and syncer agree on."""
        return tuple(m.TensorSpec(f"blocks.{p:04d}.weight", self.shape) for p in range(self.fragments))

    def overrides(self) -> list[str]:
        """Return the run's options: all learners count, one round in flight, a fragment due at every tick."""
        return [
            "run.name=synthetic", "sync.steps=1000000", "sync.overlap_steps=1",
            "sync.checkpoint_rounds=1000000", f"sync.learners={self.senders}", f"sync.quorum={self.senders}",
            f"sync.fragments={self.fragments}", f"sync.interval_steps={self.fragments}",
            f"sync.push_codec={self.push_codec}", f"sync.update_codec={self.update_codec}",
        ]  # fmt: skip


# ---- the syncer ----


class Syncer:
    """`archipel syncer` with weights made for a load."""

    def __init__(self, load_: Load, folder: Path) -> None:
        folder.mkdir(parents=True)
        self.out = folder / "syncer"
        config, weights, address = folder / "run.toml", folder / "weights.safetensors", folder / "address"
        config.write_text(dump(load(None, load_.overrides())))
        write_weights(load_, weights)
        command = [sys.executable, "-m", "archipel", "syncer", str(config), "--listen", "127.0.0.1:0"]
        command += ["--out", str(self.out), "--address-file", str(address), "--init", str(weights)]
        command += ["--tls", load_.tls] if load_.tls else []
        log = folder / "syncer.log"
        with log.open("w") as stream:
            self.process = subprocess.Popen(command, stderr=stream)
        deadline = time.monotonic() + WAIT_S
        while not address.exists():
            if self.process.poll() is not None or time.monotonic() > deadline:
                self.stop()
                raise SystemExit(f"the syncer did not start: {log.read_text()}")
            time.sleep(0.02)
        self.address = address.read_text()
        weights.unlink()

    def stop(self) -> None:
        """End it at once: nothing of it is kept."""
        self.process.kill()
        self.process.wait()


def write_weights(load_: Load, path: Path) -> None:
    """Write a tensor for each fragment, as `--init` reads them."""
    from safetensors.numpy import save_file

    generator = np.random.default_rng(0)
    save_file(
        {spec.name: generator.standard_normal(spec.shape, np.float32) for spec in load_.schema}, str(path)
    )


def cpu_s(pid: int) -> float:
    """Return the processor seconds a process has used, of user and system."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


# ---- one sender ----


class Sender:
    """The network's sink and the host's port of one learner without a trainer.

    `local`: the weights its outer gradients are measured to, one array a fragment; shared, never written.
    """

    def __init__(self, name: str, load_: Load, address: str, folder: Path, local: list[np.ndarray]) -> None:
        machine = LearnerMachine(name=name, incarnation="a", run="")
        header = Header("", name, "learner", "a", time.time(), settings=seed_of(machine))
        self.machine = machine
        self.landed: queue.SimpleQueue[tuple[int, int]] = queue.SimpleQueue()  # (fragment, version)
        self.resumed = threading.Event()
        self.encode_s = self.decode_s = 0.0
        self._load = load_
        self._options = SyncOptions()
        self._buffers = Buffers(kept=BUFFERS_KEPT)
        self._watched: tuple[int, ...] = ()
        self._held = [np.empty(load_.numel, np.float32) for _ in local]  # version that landed last
        self._local = local
        self.host = Host(machine, self, TapeWriter(tape_path(folder, name, "a"), header), name=name)
        secured = security.load(load_.tls, "learner") if load_.tls else None
        self.client = Client(self, NetworkOptions(), address=address, worker=name, run="", security=secured)
        self._thread = threading.Thread(target=self.host.run, name=name, daemon=True)

    def start(self) -> None:
        """Connect, and join."""
        self._thread.start()
        self.client.start()

    def step(self) -> None:
        """Complete an inner step, of no cost; the buffers are the copies of it. From any thread."""
        self.host.call(self._step)

    def _step(self) -> None:
        step = m.StepCompleted(self.machine.step + 1, TOKENS, 0.001, self._watched)
        self.host.handle(step)

    # ---- the network's words, from its threads ----

    def connected(self) -> None:
        self.host.post(m.Connected(m.SYNCER))

    def disconnected(self, reason: str) -> None:
        self.host.post(m.Disconnected(m.SYNCER, reason))

    def refused(self, reason: str, final: bool) -> None:
        if final:
            self.host.post(m.Received(m.SYNCER, m.Refused(reason, final=True)))

    def allocate(self, message: bytes, length: int) -> memoryview:
        if not isinstance(decode_envelope(message).message, m.Update):
            raise PayloadError(f"a payload of {length} bytes nobody waits for")
        return memoryview(self._buffers.take(length))

    def received(self, message: bytes, payload: memoryview | None, seconds: float) -> None:
        self.host.deliver(m.SYNCER, message, payload)

    # ---- what the host wants done, as in a courier ----

    def send(self, to: str, message: m.Message, envelope: bytes) -> None:
        if isinstance(message, m.Push):
            self.client.send_bulk(envelope, self._encoded(message), done=self._pushed)
        else:
            self.client.send(envelope)

    def _encoded(self, push: m.Push) -> np.ndarray:
        began = time.perf_counter()
        base, local = self._held[push.fragment], self._local[push.fragment]
        name, block = self._options.push_codec, self._options.codec_block
        out = self._buffers.take(codec.encoded_bytes(name, base.size, block))
        payload = codec.encode_difference(name, base, local, block, out)
        self.encode_s += time.perf_counter() - began
        return payload

    def _pushed(self, complete: bool, reason: str) -> None:
        if not complete:
            print(f"push failed: {reason}", file=sys.stderr)

    def act(self, action: m.Action, payload: Any | None) -> None:
        match action:
            case m.Prepare(settings=settings):
                self._options = options_of(settings)
                codec.warm(
                    self._options.push_codec, self._options.update_codec, block=self._options.codec_block
                )
                self.host.post(m.Prepared(self._load.schema))
            case m.Copy(fragments=fragments):
                self._watched = fragments
            case m.Apply(fragment=fragment, version=version):
                self._apply(fragment, version, payload)
            case m.Resume():
                self.resumed.set()

    def _apply(self, fragment: int, version: int, payload: Any) -> None:
        began = time.perf_counter()
        held, options = self._held[fragment], self._options
        codec.decode(options.update_codec, payload, held.size, options.codec_block, held)
        self.decode_s += time.perf_counter() - began
        self.host.handle(m.Applied(fragment, version, self.machine.step))
        self.landed.put((fragment, version))

    def discard(self, payload: Any) -> None:
        pass


# ---- processes full of them ----


def serve(connection: Connection, load_: Load, address: str, folder: str, names: list[str]) -> None:
    """Run in a process: senders that do as `connection` says: ("round", times) or ("time",)."""
    generator = np.random.default_rng(1)
    local = [generator.standard_normal(load_.numel, np.float32) for _ in range(load_.fragments)]
    senders = [Sender(name, load_, address, Path(folder), local) for name in names]
    for sender in senders:
        sender.start()
    for sender in senders:
        if not sender.resumed.wait(WAIT_S):
            raise SystemExit(f"{sender.machine.name} did not join: state={sender.machine.state}")
        while not sender.landed.empty():
            sender.landed.get()
    connection.send("ready")
    while True:
        match connection.recv():
            case ("rounds", int(count)):
                for _ in range(count):
                    one_round(senders)
                connection.send(count)
            case ("times",):
                connection.send((sum(s.encode_s for s in senders), sum(s.decode_s for s in senders)))
            case call, *arguments if callable(call):
                connection.send(call(*arguments))


def one_round(senders: list[Sender]) -> None:
    """Step once at each, and wait until the update that follows has landed at all."""
    for sender in senders:
        sender.step()
    for sender in senders:
        sender.landed.get(timeout=WAIT_S)


class Crowd:
    """All processes of senders, driven together."""

    def __init__(self, load_: Load, address: str, folder: Path) -> None:
        context = multiprocessing.get_context("spawn")
        self.processes, self._connections = [], []
        for index in range(load_.processes):
            names = [f"learner-{i}" for i in range(index, load_.senders, load_.processes)]
            ours, theirs = context.Pipe()
            process = context.Process(target=serve, args=(theirs, load_, address, str(folder), names))
            process.daemon = True
            process.start()
            theirs.close()
            self.processes.append(process)
            self._connections.append(ours)
        assert self._answers() == ["ready"] * load_.processes

    def rounds(self, count: int) -> float:
        """Run rounds, and return their seconds."""
        began = time.perf_counter()
        self._tell("rounds", count)
        self._answers()
        return time.perf_counter() - began

    def times(self) -> tuple[float, float]:
        """Return the seconds all senders have spent in encoding pushes and decoding updates."""
        self._tell("times")
        encode_s, decode_s = zip(*self._answers(), strict=True)
        return sum(encode_s), sum(decode_s)

    def call(self, function: Callable[..., Any], *arguments: Any) -> list[Any]:
        """Call a module's function in each process at once, and return what each returned."""
        self._tell(function, *arguments)
        return self._answers()

    def _tell(self, *words: Any) -> None:
        for connection in self._connections:
            connection.send(words)

    def _answers(self) -> list[Any]:
        answers = []
        for connection, process in zip(self._connections, self.processes, strict=True):
            if not connection.poll(WAIT_S):
                raise SystemExit(f"process {process.pid} of senders said nothing for {WAIT_S:.0f} s")
            answers.append(connection.recv())
        return answers

    def stop(self) -> None:
        """End the processes."""
        for process in self.processes:
            process.kill()
            process.join()
