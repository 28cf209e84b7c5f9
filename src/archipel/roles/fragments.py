"""A learner's tensors in its trainer: copies out, updates in, fragment by fragment, through shared memory.

The half of `roles.trainer` that a learner (or observer) adds to it (Decoupled DiLoCo). Invariants: a copy is
taken before anything of the step's end is applied; a copy in use is never overwritten.
"""

from typing import Any

from torch import nn

from ..protocol.schedule import SyncOptions, options_of
from ..runtime import frames
from ..runtime.shared import Channel, Region, SlotPool
from ..train.parameters import Parameters


class Fragments:
    """The fragments of one learner's model, and the memory they share with its courier."""

    def __init__(self) -> None:
        self.options = SyncOptions()
        self.versions: list[int] = []
        self._channel: Channel | None = None
        self._parameters: Parameters | None = None
        self._snapshots: SlotPool | None = None
        self._updates: SlotPool | None = None
        self._region: Region | None = None
        self._watched: tuple[int, ...] = ()
        self._writes: dict[int, frames.Write] = {}

    @property
    def round(self) -> int:
        """Merges that the weights held here have been through, over all fragments."""
        return sum(version for version in self.versions if version > 0)

    @property
    def paced(self) -> bool:
        """Whether the trainer may be told to wait after a step."""
        return frames.paced(self.options)

    @property
    def takes_word_before_steps(self) -> bool:
        """Frames may be taken in before a step is reported: what lands still does so behind it."""
        return True

    def settle(self, settings: dict[str, Any]) -> None:
        """Take over the run's settings."""
        self.options = options_of(settings)

    def open(self, channel: Channel, model: nn.Module, environment: dict[str, Any]) -> None:
        """Cut the model into fragments, lay out the shared region, and say that both are ready."""
        self._channel = channel
        self._parameters = parameters = Parameters(model, self.options)
        layout = frames.layout(parameters.numels, self.options.overlap_steps)
        self._region = Region.create(layout.nbytes)
        self._snapshots = SlotPool(self._region, layout.snapshot_slots, layout.slot_numel)
        self._updates = SlotPool(
            self._region, layout.update_slots, layout.slot_numel, offset=layout.updates_offset, home=False
        )
        self.versions = [-1] * len(parameters.fragments)
        rounded = tuple(frames.Rounded(*part) for part in parameters.rounded())  # type: ignore[arg-type]
        ready = frames.Ready(parameters.schema, layout, rounded, environment)
        channel.send(frames.encode(ready), [self._region.fd])

    def copies(self) -> tuple[tuple[int, int], ...]:
        """Copy what is watched; return (fragment, slot) of each copy."""
        return tuple(copy for fragment in self._watched if (copy := self._copy(fragment)) is not None)

    def _copy(self, fragment: int) -> tuple[int, int] | None:
        assert self._parameters is not None and self._snapshots is not None
        slot = self._snapshots.take()
        if slot is None:
            return None  # the courier lags: the next step's copy will do
        self._parameters.read(fragment, self._snapshots.view(slot, self._parameters.numels[fragment]))
        return fragment, slot

    def take(self, frame: frames.Frame) -> None:
        """Take in a frame that is about tensors."""
        match frame:
            case frames.Watch(fragments=fragments):
                self._watched = fragments
            case frames.Write():
                self._writes[frame.fragment] = frame
            case frames.Free(slot=slot):
                assert self._snapshots is not None
                self._snapshots.give(slot)

    def land(self, step: int) -> None:
        """Write the updates that wait over their fragments."""
        if not self._writes:
            return
        assert self._parameters is not None and self._updates is not None and self._channel is not None
        for write in self._writes.values():
            weights = self._updates.view(write.slot, self._parameters.numels[write.fragment])
            self._parameters.write(write.fragment, weights)
            self.versions[write.fragment] = write.version
            wrote = frames.Wrote(write.fragment, write.version, write.slot, step)
            self._channel.send(frames.encode(wrote))
        self._writes.clear()

    def close(self) -> None:
        """Let go of the shared memory."""
        if self._region is not None:
            self._region.close()
