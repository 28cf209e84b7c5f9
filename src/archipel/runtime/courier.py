"""The courier's side of a learner's compute port: shared memory in, encoded payloads out, and back.

It holds, for each fragment, the weights of the version the trainer works from (the base of the outer
gradient), the newest copy the trainer made, and the newest update that waits for a slot. The trainer owns no
socket, the network no tensor; this is where bytes become one or the other. No torch.

Invariants: the base is the version that landed last, rounded as the trainer rounds it, so that a bfloat16
learner does not push its own rounding error; an update that waits gives way to a newer one.
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ..errors import PayloadError
from ..numerics import codec
from ..protocol import messages as m
from ..protocol.schedule import SyncOptions, options_of
from . import frames
from .buffers import Buffers
from .shared import Channel, Region, SlotPool

log = logging.getLogger("archipel")

BUFFERS_KEPT = 3  # a push that leaves, an update that comes in, and one that has just landed


@dataclass
class Desk:
    """What the courier knows of one fragment."""

    base: np.ndarray | None = None  # (numel,) float32, the version that landed last
    coming: dict[int, np.ndarray] = field(default_factory=dict)  # version -> base, given to the trainer
    waiting: tuple[int, np.ndarray] | None = None  # (version, weights) for which no slot is free yet
    snapshot: int | None = None  # slot of the newest copy
    residual: np.ndarray | None = None  # error feedback


class CourierCompute:
    """Answers the learner's machine. `said`: takes the events that follow from the trainer's frames."""

    def __init__(self, channel: Channel, said: Callable[[m.Event], None]) -> None:
        self.options = SyncOptions()
        self.layout: frames.Layout | None = None
        self.buffers = Buffers(kept=BUFFERS_KEPT)
        self._channel = channel
        self._said = said
        self._desks: list[Desk] = []
        self._rounded: tuple[frames.Rounded, ...] = ()
        self._region: Region | None = None
        self._snapshots: SlotPool | None = None
        self._updates: SlotPool | None = None

    # ---- from the trainer ----

    def receive(self, frame: frames.Frame) -> None:
        """Turn one of the trainer's frames into the event it is."""
        match frame:
            case frames.Ready():
                self._open(frame)
                self._said(m.Prepared(frame.schema, frame.environment))
            case frames.Stepped():
                self._stepped(frame)
            case frames.Wrote():
                self._wrote(frame)
                self._said(m.Applied(frame.fragment, frame.version, frame.step))
            case frames.Ended(reason=reason):
                self._said(m.StopRequested(reason))

    def _stepped(self, stepped: frames.Stepped) -> None:
        # The machine answers from copies of the newest step only: older ones would but keep slots from it.
        for fragment in range(len(self._desks)):
            self._release(fragment)
        for fragment, slot in stepped.copies:
            self._desks[fragment].snapshot = slot
        copied = tuple(fragment for fragment, _ in stepped.copies)
        self._said(m.StepCompleted(stepped.step, stepped.tokens, stepped.step_s, copied, stepped.tick))
        if frames.paced(self.options):
            self._tell(frames.Settled(stepped.step))

    def _open(self, ready: frames.Ready) -> None:
        layout = ready.layout
        self._region = Region.attach(self._channel.descriptors.popleft(), layout.nbytes)
        self._snapshots = SlotPool(self._region, layout.snapshot_slots, layout.slot_numel, home=False)
        self._updates = SlotPool(
            self._region, layout.update_slots, layout.slot_numel, offset=layout.updates_offset
        )
        self._desks = [Desk() for _ in layout.numels]
        self._rounded = ready.rounded
        self.layout = layout

    def _release(self, fragment: int) -> None:
        """Give the copy's slot back to the trainer."""
        desk = self._desks[fragment]
        if desk.snapshot is not None:
            self._tell(frames.Free(desk.snapshot))
            desk.snapshot = None

    def _wrote(self, wrote: frames.Wrote) -> None:
        desk = self._desks[wrote.fragment]
        desk.base = desk.coming.pop(wrote.version)
        self._release(wrote.fragment)
        assert self._updates is not None
        self._updates.give(wrote.slot)
        self._hand_over()

    # ---- to the trainer ----

    def act(self, action: m.Action, payload: Any | None) -> None:
        """Carry out what the machine wants of the trainer."""
        match action:
            case m.Prepare(settings=settings, shard=shard, position=position):
                self.options = options = options_of(settings)
                codec.warm(options.push_codec, options.update_codec, block=options.codec_block)
                self._tell(frames.Build("", settings, shard, position))
            case m.Copy(fragments=fragments):
                self._tell(frames.Watch(fragments))
            case m.Apply(fragment=fragment, version=version):
                if payload is None:
                    # The fragment stays as it is until its next update: it may lag by versions.
                    log.warning("ignored update fragment=%d version=%d: no payload", fragment, version)
                    return
                self._apply(fragment, version, payload)
            case m.Hold():
                self._tell(frames.Pace(True))
            case m.Resume():
                self._tell(frames.Pace(False))
            case m.Stop(reason=reason):
                self._tell(frames.Halt(reason, True))

    def _apply(self, fragment: int, version: int, payload: Any) -> None:
        assert self.layout is not None
        numel = self.layout.numels[fragment]
        weights = codec.decode(
            self.options.update_codec, payload, numel, self.options.codec_block, self.buffers.floats(numel)
        )
        self._desks[fragment].waiting = (version, weights)
        self._hand_over()

    def _hand_over(self) -> None:
        """Put waiting updates into free slots."""
        assert self._updates is not None
        for fragment, desk in enumerate(self._desks):
            if desk.waiting is None or desk.coming:
                continue
            slot = self._updates.take()
            if slot is None:
                return
            (version, weights), desk.waiting = desk.waiting, None
            self._updates.view(slot, weights.size)[:] = weights
            # `waiting` becomes the base once the trainer says it wrote it.
            round_as_held(fragment, weights, self._rounded)
            desk.coming[version] = weights
            self._tell(frames.Write(fragment, version, slot))

    def _tell(self, frame: frames.Frame) -> None:
        self._channel.send(frames.encode(frame))

    # ---- to the network ----

    def payload(self, message: m.Message, to: str = m.SYNCER) -> np.ndarray | None:
        """Return the bytes that travel beside a message, None if nothing does."""
        return self._push(message) if isinstance(message, m.Push) else None

    def _push(self, push: m.Push) -> np.ndarray:
        """Return the bytes of a push, encoded from the newest copy."""
        assert self._snapshots is not None and self.layout is not None
        desk = self._desks[push.fragment]
        assert desk.snapshot is not None and desk.base is not None, "a push without a copy to make it from"
        local = self._snapshots.view(desk.snapshot, self.layout.numels[push.fragment])
        name, block = "float32" if push.full else self.options.push_codec, self.options.codec_block
        out = self.buffers.take(codec.encoded_bytes(name, local.size, block))
        if push.full:
            return codec.encode(name, local, block, out)
        if self.options.error_feedback and desk.residual is None:
            desk.residual = np.zeros(local.size, np.float32)
        return codec.encode_difference(name, desk.base, local, block, out, residual=desk.residual)

    def room(self, sender: str, message: m.Message, length: int) -> memoryview:
        """Return memory for the payload of a message that comes in. PayloadError if it may not."""
        layout, options = self.layout, self.options
        if (
            not isinstance(message, m.Update)
            or layout is None
            or not 0 <= message.fragment < len(layout.numels)
        ):
            raise PayloadError(f"a payload of {length} bytes nobody waits for")
        numel = layout.numels[message.fragment]
        expected = codec.encoded_bytes(options.update_codec, numel, options.codec_block)
        if length != expected:
            raise PayloadError(
                f"update of fragment {message.fragment}: {length} bytes, {expected} expected "
                f"({numel} elements as {options.update_codec})"
            )
        return memoryview(self.buffers.take(length))

    def close(self) -> None:
        """Let go of the shared memory."""
        if self._region is not None:
            self._region.close()


def round_as_held(fragment: int, weights: np.ndarray, rounded: tuple[frames.Rounded, ...]) -> None:
    """Make of a fragment's weights, in place, what a trainer's less precise tensors will hold."""
    for part in rounded:
        if part.fragment == fragment:
            values = weights[part.start : part.stop]
            if part.dtype == "bfloat16":
                codec.round_to_bf16(values, values)
            else:
                values[:] = values.astype(np.float16)
