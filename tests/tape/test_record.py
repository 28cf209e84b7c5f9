"""Every event, action and message comes back from its line as it was."""

import math
from typing import Any, Literal, get_args, get_origin, get_type_hints

import msgspec
import pytest

from archipel.protocol import messages
from archipel.protocol.messages import Action, Event, Message
from archipel.tape.record import Record, decode, encode


def of_type(hint: Any) -> Any:
    """An instance of an annotation, with values that differ from every default."""
    if isinstance(hint, type) and issubclass(hint, msgspec.Struct):
        return filled(hint)
    origin, args = get_origin(hint), get_args(hint)
    if origin is tuple:
        return (of_type(args[0]),) * 2 if args[1:] == (...,) else tuple(map(of_type, args))
    if origin is dict:
        return {"key": {"deep": [1, None, 2.5, "text"]}}
    if origin is Literal:
        return args[-1]
    if args:  # a union
        return of_type(args[-1])
    return {int: 41, float: 0.1, str: "a\tb\n\u2028é", bool: True}[hint]


def filled(kind: Any) -> Any:
    return kind(*[of_type(hint) for hint in get_type_hints(kind).values()])


def kinds(root: type) -> list[Any]:
    return [
        k for k in vars(messages).values() if isinstance(k, type) and issubclass(k, root) and k is not root
    ]


@pytest.mark.parametrize("kind", kinds(Event) + kinds(Action) + kinds(Message), ids=lambda k: k.__name__)
def test_every_type_comes_back_as_it_was(kind: Any) -> None:
    value = filled(kind)
    event = value if isinstance(value, Event) else messages.Woke()
    event = messages.Received("w", value) if isinstance(value, Message) else event
    actions = (value,) if isinstance(value, Action) else ()
    actions = (messages.Send("w", value),) if isinstance(value, Message) else actions
    record = Record(0, 1.5, event, actions, {"w": 1})
    assert decode(encode(record)) == record


def test_every_kind_of_type_is_tested() -> None:
    assert len(kinds(Event)) >= 12 and len(kinds(Action)) >= 14 and len(kinds(Message)) >= 13


@pytest.mark.parametrize("number", [math.inf, -math.inf])
def test_infinite_numbers_come_back(number: float) -> None:
    record = Record(0, 0.0, messages.Woke(), (messages.Wake(number),))
    assert decode(encode(record)) == record


def test_a_peer_that_sends_nan_can_be_recorded() -> None:
    record = Record(0, 0.0, messages.Received("w", messages.Progress(1, 2, math.nan)))
    assert math.isnan(decode(encode(record)).event.message.step_s)
