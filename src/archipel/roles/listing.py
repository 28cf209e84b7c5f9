"""A peer of a run whose members stand in its file, in `[members]`: what no rendezvous tells it."""

import json
from typing import Any

import msgspec

from .. import config as configuration
from ..errors import ConfigError
from ..runtime.wire import split_address
from .rendezvous import settings_for


def member_arguments(
    config: configuration.Config, name: str, listen: str, *, own_model: bool
) -> tuple[str, list[str]]:
    """Return where a member listens and what its courier must be told. ConfigError if the list lacks it.

    listen: "" for the address in the list. own_model: the training script has a model and data of its own,
    so that the built-in ones of the file are not looked at.
    """
    if not config.members:
        raise ConfigError(
            'there is neither a rendezvous nor a section [members] with a line `name = "host:port"` for '
            "each peer: give one of them"
        )
    if name not in config.members:
        raise ConfigError(f"name {name!r} is not in [members] ({', '.join(config.members)}): give --name")
    for address in config.members.values():
        split_address(address, listening=False)  # an error now, and not at everybody's
    settings: dict[str, Any] = configuration.settings_of(config) if own_model else settings_for(config)
    told = ["--members", json.dumps(config.members), "--settings", msgspec.json.encode(settings).decode()]
    return listen or config.members[name], told
