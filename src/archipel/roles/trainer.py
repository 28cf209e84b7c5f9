"""The training process's half of a learner: copies out, updates in, at one known line (DESIGN.md, section 1).

`Trainer.step` is all that runs in a user's loop. It touches shared memory and one local socket, never the
network: at the end of an inner step it copies the fragments that can be asked for next, says that the step is
done, lets the updates land that wait, and returns. It waits only where the run's settings say so (τ = 0,
`max_lead_steps`).

Invariants: a snapshot is taken before anything is applied; where a step may have to be waited after, it is:
the courier has then said so before the next one begins.
"""

import logging
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from ..errors import JoinRefused, WorkerDied
from ..protocol.schedule import SyncOptions, options_of
from ..runtime import frames
from ..runtime.launch import spawn_courier
from ..runtime.shared import Channel, Region, SlotPool
from ..train.parameters import Parameters

POLL_S = 0.5  # how often a trainer that waits looks whether it was asked to stop
SAY_S = 10.0  # how often a trainer that cannot begin yet says so
CLOSE_S = 10.0  # for a courier to deliver its goodbye

log = logging.getLogger("archipel")


def _never() -> str:
    return ""


class Trainer:
    """One learner's (or observer's) trainer, with its courier process."""

    def __init__(
        self,
        courier_arguments: list[str],
        *,
        stopped: Callable[[], str] = _never,
        env: dict[str, str] | None = None,
    ) -> None:
        """Start the courier; it connects and joins in the background. Arguments: see `roles.courier`.

        stopped: asked at every step and while waiting; a reason ends this worker's part.
        """
        self._stopped = stopped
        self._channel, theirs = Channel.pair()
        self._courier: subprocess.Popen[bytes] = spawn_courier(courier_arguments, theirs, env=env)
        self.build: frames.Build | None = None
        self.options = SyncOptions()
        self.versions: list[int] = []
        self.tick = 0
        self.step_count = 0
        self.done = False
        self._closed = False
        self.reason = ""
        self._parameters: Parameters | None = None
        self._snapshots: SlotPool | None = None
        self._updates: SlotPool | None = None
        self._region: Region | None = None
        self._watched: tuple[int, ...] = ()
        self._writes: dict[int, frames.Write] = {}
        self._holding = True  # until every fragment is adopted
        self._settled = 0  # newest step whose consequences the courier has told us
        self._began = self._resumed_at = time.perf_counter()
        self._said_at = self._began

    # ---- joining ----

    def settings(self) -> dict[str, Any]:
        """Wait for the syncer's settings; {} when stopped before. JoinRefused if it will not have us."""
        while self.build is None and self._goes_on():
            self._receive(POLL_S)
            self._say("the run's settings")
        if self.build is None:
            return {}
        self.options = options_of(self.build.settings)
        return self.build.settings

    def adopt(self, model: nn.Module, environment: dict[str, Any] | None = None) -> None:
        """Split the model into fragments, join with its schema, and take over the run's weights.

        environment: what else, beside torch and its threads, a replay of this learner must know.
        """
        self._parameters = parameters = Parameters(model, self.options)
        layout = frames.layout(parameters.numels, self.options.overlap_steps)
        self._region = Region.create(layout.nbytes)
        self._snapshots = SlotPool(self._region, layout.snapshot_slots, layout.slot_numel)
        self._updates = SlotPool(
            self._region, layout.update_slots, layout.slot_numel, offset=layout.updates_offset, home=False
        )
        self.versions = [-1] * len(parameters.fragments)
        rounded = tuple(frames.Rounded(*part) for part in parameters.rounded())  # type: ignore[arg-type]
        known = {**_environment(model), **(environment or {})}
        self._tell(frames.Ready(parameters.schema, layout, rounded, known), [self._region.fd])
        while self._holding and self._goes_on():
            self._receive(POLL_S)
            self._land()
            self._say("the run's weights")
        self._resumed_at = time.perf_counter()

    def _say(self, what: str) -> None:
        now = time.perf_counter()
        if now - self._said_at >= SAY_S:
            self._said_at = now
            log.warning("waiting for=%r waited_s=%.0f (the courier's lines say why)", what, now - self._began)

    # ---- training ----

    def step(self, tokens: int) -> None:
        """Report one inner step over `tokens` tokens; let what has come land. See the module's description.

        Once `done`, nothing is reported any more.
        """
        if self.done:
            return
        step_s = time.perf_counter() - self._resumed_at
        tick = self.tick  # what the step's learning rate followed
        self._receive(0.0)
        self.step_count += 1
        copies = tuple(copy for fragment in self._watched if (copy := self._copy(fragment)) is not None)
        self._tell(frames.Stepped(self.step_count, tokens, step_s, copies, tick))
        self._land()
        while self._goes_on() and (self._holding or self._unsettled()):
            self._receive(POLL_S)
            self._land()
        self._resumed_at = time.perf_counter()

    def _unsettled(self) -> bool:
        """Whether the courier may still say that this step is one to wait after, or to copy the next at."""
        return frames.paced(self.options) and self._settled < self.step_count

    def wait(self, timeout_s: float) -> None:
        """Let updates land for a while without training (an observer's life)."""
        if self._goes_on():
            self._receive(timeout_s)
            self._land()

    def close(self, reason: str) -> None:
        """Say goodbye in order, and wait for the courier to end. Twice is once."""
        if self._closed:
            return
        self._closed = True
        try:
            self._channel.send(frames.encode(frames.Ended(reason or self.reason)))
            self._courier.wait(timeout=CLOSE_S)
        except (WorkerDied, subprocess.TimeoutExpired):
            self._courier.kill()
            self._courier.wait()
        self._channel.close()
        if self._region is not None:
            self._region.close()

    def _goes_on(self) -> bool:
        """Return whether this worker's part is not over; a request to stop ends it."""
        if not self.done and (reason := self._stopped()):
            self.done, self.reason = True, reason
        return not self.done

    def _copy(self, fragment: int) -> tuple[int, int] | None:
        assert self._parameters is not None and self._snapshots is not None
        slot = self._snapshots.take()
        if slot is None:
            return None  # the courier lags: the next step's copy will do
        self._parameters.read(fragment, self._snapshots.view(slot, self._parameters.numels[fragment]))
        return fragment, slot

    def _land(self) -> None:
        if not self._writes:
            return
        assert self._parameters is not None and self._updates is not None
        for write in self._writes.values():
            weights = self._updates.view(write.slot, self._parameters.numels[write.fragment])
            self._parameters.write(write.fragment, weights)
            self.versions[write.fragment] = write.version
            self._tell(frames.Wrote(write.fragment, write.version, write.slot, self.step_count))
        self._writes.clear()

    # ---- the courier ----

    def _tell(self, frame: frames.Frame, fds: list[int] | None = None) -> None:
        try:
            self._channel.send(frames.encode(frame), fds or ())
        except WorkerDied:
            self._receive(0.0)  # its last words may say why
            raise self._died() from None

    def _receive(self, timeout_s: float) -> None:
        try:
            received = self._channel.receive(timeout_s)
        except WorkerDied:
            if self.done:
                return
            raise self._died() from None
        for data in received:
            self._note(frames.decode(data))

    def _note(self, frame: frames.Frame) -> None:
        match frame:
            case frames.Build():
                self.build = frame
            case frames.Watch(fragments=fragments):
                self._watched = fragments
            case frames.Write():
                self._writes[frame.fragment] = frame
            case frames.Free(slot=slot):
                assert self._snapshots is not None
                self._snapshots.give(slot)
            case frames.Pace(hold=hold):
                self._holding = hold
            case frames.Settled(step=step):
                self._settled = step
            case frames.News(tick=tick):
                self.tick = tick
            case frames.Halt(reason=reason, complete=complete):
                self.done, self.reason = True, reason
                if not complete:
                    raise JoinRefused(f"this worker cannot take part in the run: {reason}")

    def _died(self) -> WorkerDied:
        try:
            code: int | None = self._courier.wait(timeout=2.0)
        except subprocess.TimeoutExpired:
            code = None
        how = "its channel closed" if code is None else f"signal {-code}" if code < 0 else f"exit {code}"
        return WorkerDied(
            f"the courier process {self._courier.pid} of this learner is gone ({how}): "
            "without it nothing is reported; see its log above and start the learner again"
        )


def _environment(model: nn.Module) -> dict[str, Any]:
    """Return what could change a bit of an inner step's result."""
    device = next((parameter.device for parameter in model.parameters()), torch.device("cpu"))
    found = {
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
        "torch": str(torch.__version__),
        "threads": torch.get_num_threads(),
        "cpu": torch.backends.cpu.get_cpu_capability(),
    }
    if "transformers" in sys.modules:
        found["transformers"] = str(sys.modules["transformers"].__version__)
    return found
