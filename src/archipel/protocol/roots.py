"""The roots of messages, events and actions, and what a tensor is to workers that must agree on it."""

from typing import Literal

from msgspec import Struct

PROTOCOL_VERSION = 1


class TensorSpec(Struct, frozen=True, array_like=True):
    """One synchronised tensor as workers must agree on it. Data types may differ between workers."""

    name: str
    shape: tuple[int, ...]
    kind: Literal["parameter", "buffer"] = "parameter"


class Message(Struct, frozen=True, tag=True, omit_defaults=True):
    """Root of everything that travels between workers."""


class Event(Struct, frozen=True, tag=True, omit_defaults=True):
    """Root of everything a machine is told."""


class Action(Struct, frozen=True, tag=True, omit_defaults=True):
    """Root of everything a machine decides."""
