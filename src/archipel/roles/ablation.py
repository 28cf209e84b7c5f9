"""What a replay may change and still follow the recorded decisions: the same storm, another mathematics.

A decision was made from counts (steps, tokens, ticks), times and fragment numbers, never from a tensor's
value. So whatever only computes may change: how outer gradients are merged, encoded and applied, which
tensors make up fragment p, the model, the inner optimizer, the text. What decisions were made from may not:
with another number of fragments or another batch the run would have gone another way, and only the simulator
can say which.
"""

from typing import Any

import msgspec

from ..config import Config, from_tree, override
from ..errors import ConfigError

SECTIONS = ("run", "sync", "gossip", "model", "data", "optimizer")  # that a run's settings hold
SYNC = {
    "fragmentation", "merge", "merge_granularity", "embedding_merge", "embedding_patterns", "exclude",
    "buffers", "outer_lr", "outer_momentum", "nesterov", "local_share", "push_codec", "update_codec",
    "codec_block", "error_feedback",
}  # fmt: skip
GOSSIP = {"form", "outer_lr", "outer_momentum", "codec"}
DATA_FIXED = {
    "source": "which data was counted",
    "sequence": "tokens are counted in windows of it",
    "batch": "every step's tokens are recorded, and the weights of its pushes with them",
    "shards": "recorded learners read shards by their numbers",
}


def ablated(settings: dict[str, Any], overrides: list[str]) -> Config:
    """Return the configuration that recorded settings stand for, with what a replay changes in it.

    ConfigError for a change that the recorded decisions do not allow.
    """
    tree = {name: dict(settings[name]) for name in SECTIONS if name in settings}
    recorded = msgspec.to_builtins(from_tree(tree))
    for text in overrides:
        override(tree, text)
    config = from_tree(tree)
    for section, options in msgspec.to_builtins(config).items():
        before = recorded[section] or {}
        for key, value in (options or {}).items():
            if value != before.get(key) and (reason := _fixed(section, key)):
                raise ConfigError(f"--set {section}.{key}={value}: the run had {before.get(key)}, {reason}")
    return config


def _fixed(section: str, key: str) -> str:
    """Return why a replay may not change an option, "" if it may."""
    if section in ("model", "optimizer", "evaluate"):
        return ""
    if section == "data":
        why = DATA_FIXED.get(key)
        return f"and that stays: {why}; run it anew to learn of another" if why else ""
    if section == "run":
        return "which is in its data and model seeds already: change model.seed or data.seed"
    if section == "gossip":
        return "" if key in GOSSIP else f"and a replay may change gossip.{{{', '.join(sorted(GOSSIP))}}} only"
    if section != "sync":
        return f"and nothing of [{section}] takes part in a replay"
    if key in SYNC:
        return ""
    if key == "fragments":
        return (
            "and its decisions name that many fragments: sync.fragmentation may change what each of them "
            "holds, another number needs a run of its own (archipel simulate, archipel train)"
        )
    return (
        "and its recorded decisions follow from that: archipel simulate shows what other ones come to; "
        f"a replay may change sync.{{{', '.join(sorted(SYNC))}}}, and any of [model], [optimizer], [data] "
        "that does not change what is counted"
    )
