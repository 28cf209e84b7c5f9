"""One TOML file, one tree of small frozen option classes: load, override, validate.

Each section's class lives beside its owner; nothing below this file reads the whole tree. Rules between
sections, and warnings that no single class can give, are here.
"""

import re
import tomllib
from pathlib import Path
from typing import Any, TypeVar

import msgspec
from msgspec import Struct

from .errors import ConfigError
from .numerics import stability
from .protocol.gossip import GossipOptions
from .protocol.schedule import SyncOptions
from .runtime.checkpoint import CheckpointOptions
from .runtime.launch import LaunchOptions
from .runtime.wire import NetworkOptions
from .sim.scenario import SimOptions
from .train.options import DataOptions, EvaluateOptions, ModelOptions, OptimizerOptions, check

MOMENTUM_ROUNDS = 100  # rounds per fragment below which a high outer momentum overshoots (spec, section 1)
MOMENTUM_SHORT = 0.7


T = TypeVar("T")


class RunOptions(Struct, frozen=True, forbid_unknown_fields=True):
    """Section `[run]`."""

    name: str = "run"  # its identity: workers of another run are refused
    seed: int = 0  # added to the seeds of model and data
    out: str = "out"  # folder in which run folders are made


class Config(Struct, frozen=True, forbid_unknown_fields=True):
    """Everything a run can be told."""

    run: RunOptions = RunOptions()
    sync: SyncOptions = SyncOptions()
    gossip: GossipOptions | None = None  # given: peers that exchange models, and no syncer
    model: ModelOptions = ModelOptions()
    data: DataOptions = DataOptions()
    optimizer: OptimizerOptions = OptimizerOptions()
    evaluate: EvaluateOptions = EvaluateOptions()
    network: NetworkOptions = NetworkOptions()
    checkpoint: CheckpointOptions = CheckpointOptions()
    launch: LaunchOptions = LaunchOptions()
    sim: SimOptions = SimOptions()
    members: dict[str, str] = {}  # of a gossip run without a rendezvous: peer -> "host:port"


def load(path: str | Path | None, overrides: list[str] | None = None) -> Config:
    """Return the checked configuration of a TOML file, with `section.key=value` overrides applied.

    Raises ConfigError that names the option, its value and the rule it breaks.
    """
    tree = {} if path is None else _read(path)
    for text in overrides or []:
        override(tree, text)
    return from_tree(tree)


def _read(path: str | Path) -> dict[str, Any]:
    try:
        return tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}; give the path of a run's TOML file") from None
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{path} is not TOML: {error}") from None
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"{path} is not TOML: byte {error.start} is no UTF-8 text; save it as UTF-8, or give another file"
        ) from None


def from_tree(tree: dict[str, Any]) -> Config:
    """Return the checked configuration that nested plain data stands for."""
    try:
        config = msgspec.convert(_shared_out(tree), Config)
    except msgspec.ValidationError as error:
        words = str(error).replace("`$.", "`").replace("Object contains unknown field", "there is no option")
        raise ConfigError(f"configuration: {words}; docs/guide.md says where options are listed") from None
    validate(config)
    return config


def _shared_out(tree: dict[str, Any]) -> dict[str, Any]:
    """Return the tree with the run's learners on its imagined hardware, where that does not say how many."""
    sim, sync = tree.get("sim"), tree.get("sync", {})
    if not isinstance(sim, dict) or not isinstance(sim.get("hardware"), dict) or not isinstance(sync, dict):
        return tree
    hardware = {"learners": sync.get("learners", SyncOptions().learners), **sim["hardware"]}
    return {**tree, "sim": {**sim, "hardware": hardware}}


def from_settings(settings: dict[str, Any]) -> Config:
    """Return the configuration that a syncer's settings stand for; what they hold besides is ignored."""
    return from_tree({key: value for key, value in settings.items() if key in Config.__struct_fields__})


def section(path: str | Path | None, name: str, kind: type[T], overrides: list[str]) -> T:
    """Return the options of a TOML file's only section (None: the defaults), with overrides applied."""
    tree = _read(path) if path is not None else {}
    for text in overrides:
        override(tree, text)
    if other := sorted(tree.keys() - {name}):
        raise ConfigError(
            f"[{other[0]}] has no meaning here: only [{name}] is read, from a file of its own or --set "
            f"{name}.KEY=VALUE"
        )
    try:
        return msgspec.convert(tree.get(name, {}), kind)
    except msgspec.ValidationError as error:
        raise ConfigError(f"[{name}] {error}") from None


def override(tree: dict[str, Any], text: str) -> None:
    """Apply one `section.key=value` to nested plain data."""
    key, separator, value = text.partition("=")
    parts = key.strip().split(".")
    if not separator or len(parts) != 2:
        raise ConfigError(f"--set {text!r} is not section.key=value, as in sync.learners=4")
    try:
        parsed = tomllib.loads(f"value = {value}")["value"]
    except tomllib.TOMLDecodeError:
        parsed = value.strip()  # a bare word is a string
    section = tree.setdefault(parts[0], {})
    if not isinstance(section, dict):
        raise ConfigError(f"--set {text!r}: {parts[0]} is no section in the file; write [{parts[0]}] there")
    section[parts[1]] = parsed


def validate(config: Config) -> None:
    """Raise ConfigError where options cannot work together."""
    for section in ("model", "data", "optimizer", "evaluate"):
        check(section, getattr(config, section))
    for rule in _broken_rules(config.sync):
        raise ConfigError(f"sync.{rule}")
    for rule in _broken_gossip(config.gossip, config.data.shards) if config.gossip else ():
        raise ConfigError(f"gossip.{rule}")
    for rule in _broken_members(config):
        raise ConfigError(f"[members] {rule}")
    if not config.run.name.strip():
        raise ConfigError("run.name is empty: it tells runs apart; give one")
    if config.checkpoint.keep < 1:
        raise ConfigError(
            f"checkpoint.keep={config.checkpoint.keep} must be at least 1: a syncer resumes from them"
        )
    if config.sync.learners > config.data.shards:
        raise ConfigError(
            f"sync.learners={config.sync.learners} exceeds data.shards={config.data.shards}: "
            "every learner reads a shard of its own; raise data.shards"
        )
    hardware = config.sim.hardware
    if hardware is not None and hardware.learners != config.sync.learners:
        raise ConfigError(
            f"sim.hardware.learners={hardware.learners} is not sync.learners={config.sync.learners}: "
            "the cluster is shared out over the run's learners; leave it out of sim.hardware"
        )


def _broken_rules(sync: SyncOptions) -> list[str]:
    broken = []
    positive = (
        "steps",
        "learners",
        "quorum",
        "fragments",
        "interval_steps",
        "pulls_max",
        "checkpoint_rounds",
    )
    for name in positive:
        if getattr(sync, name) < 1:
            broken.append(f"{name}={getattr(sync, name)} must be at least 1")
    if sync.fragments > sync.interval_steps:
        broken.append(
            f"fragments={sync.fragments} exceeds sync.interval_steps={sync.interval_steps}: "
            f"a fragment would never be due; use at most {sync.interval_steps}"
        )
    if sync.overlap_steps < 0:
        broken.append(f"overlap_steps={sync.overlap_steps} must not be negative")
    if sync.fragments == sync.interval_steps and 0 < sync.interval_steps <= sync.overlap_steps:
        broken.append(
            f"overlap_steps={sync.overlap_steps} is not below sync.interval_steps={sync.interval_steps}: "
            "a fragment would be due while its last update is in flight; use a smaller overlap"
        )
    if sync.quorum > sync.learners:
        broken.append(
            f"quorum={sync.quorum} exceeds sync.learners={sync.learners}: no tick could ever close; "
            "lower the quorum or plan for more learners"
        )
    for name, low, high in (
        ("local_share", 0.0, 1.0),
        ("outer_momentum", 0.0, 1.0),
        ("grace_margin", 0.0, 1.0),
    ):
        if not low <= getattr(sync, name) < high:
            broken.append(f"{name}={getattr(sync, name)} must be in [{low}, {high})")
    if not 0 < sync.outer_lr < 100:
        broken.append(f"outer_lr={sync.outer_lr} must be positive and below 100")
    if sync.codec_block < 2 or sync.codec_block % 2:
        broken.append(f"codec_block={sync.codec_block} must be even and at least 2; use 128")
    if sync.max_lead_steps is not None and sync.max_lead_steps < 0:
        broken.append(
            f"max_lead_steps={sync.max_lead_steps} must not be negative: with 0 a learner waits for every "
            "update at its tick, without the option it never waits"
        )
    for name in ("heartbeat_s", "silence_s", "pull_deadline_s"):
        if not getattr(sync, name) > 0:
            broken.append(f"{name}={getattr(sync, name)} must be positive")
    if not sync.idle_exit_s >= 0:
        broken.append(f"idle_exit_s={sync.idle_exit_s} must not be negative; 0 waits for ever")
    if sync.silence_s <= 2 * sync.heartbeat_s:
        broken.append(
            f"silence_s={sync.silence_s} is not above two sync.heartbeat_s={sync.heartbeat_s}: "
            "live learners would be taken for dead; raise it"
        )
    return broken


def _broken_gossip(gossip: GossipOptions, shards: int) -> list[str]:
    broken = [
        f"{name}={getattr(gossip, name)} must be at least 1"
        for name in ("peers", "rounds", "local_steps", "suspect_rounds", "alarm_rounds")
        if getattr(gossip, name) < 1
    ]
    broken += [
        f"{name}={getattr(gossip, name)} must be positive"
        for name in ("outer_lr", "patience", "timeout_s_min", "timeout_s_max", "start_s_max", "lease_s")
        if not getattr(gossip, name) > 0
    ]
    if not 0 < gossip.alpha <= 1:
        broken.append(
            f"alpha={gossip.alpha} must be above 0 and at most 1: it is the share of the mixing done"
        )
    if not 0 <= gossip.momentum < 1:
        broken.append(f"outer_momentum={gossip.momentum} must be in [0, 1)")
    if gossip.timeout_s_min > gossip.timeout_s_max:
        broken.append(
            f"timeout_s_min={gossip.timeout_s_min} exceeds gossip.timeout_s_max={gossip.timeout_s_max}"
        )
    if gossip.checkpoint_rounds < 0:
        broken.append(f"checkpoint_rounds={gossip.checkpoint_rounds} must not be negative; 0 writes none")
    if gossip.peers > shards:
        broken.append(
            f"peers={gossip.peers} exceeds data.shards={shards}: "
            "every peer reads a shard of its own; raise data.shards"
        )
    return broken


def _broken_members(config: Config) -> list[str]:
    members = config.members
    if not members:
        return []
    if config.gossip is None:
        return ["is of a gossip run: add a section [gossip], or start learners with --syncer"]
    if len(members) != config.gossip.peers:
        return [f"has {len(members)} peers and gossip.peers={config.gossip.peers}: make them equal"]
    if len(set(members.values())) < len(members):
        return ["gives one address to two peers: each listens at its own"]
    return []


def warnings(config: Config) -> list[str]:
    """Return what is allowed but unwise."""
    sync = config.sync
    found: list[str] = []
    if config.gossip is not None:
        return _unstable(config.gossip)
    rounds = sync.steps // sync.interval_steps
    if rounds < MOMENTUM_ROUNDS and sync.outer_momentum > MOMENTUM_SHORT:
        found.append(
            f"sync.outer_momentum={sync.outer_momentum} overshoots in a run of {rounds} rounds per fragment "
            f"(fewer than {MOMENTUM_ROUNDS}): 0.5 is a good choice"
        )
    return found


def _unstable(gossip: GossipOptions) -> list[str]:
    """Return what the theory says of a setting under which the peers drift apart (gossip, section 4)."""
    verdict = stability.stable(gossip.form, gossip.scheme, gossip.momentum, gossip.alpha, gossip.peers)
    return [] if verdict.stable else [f"gossip.outer_momentum={gossip.momentum}: {verdict}"]


def settings_of(config: Config, **extra: Any) -> dict[str, Any]:
    """Return what a run's workers are handed: the sections they must agree on, as plain data."""
    names = ("run", "sync" if config.gossip is None else "gossip", "model", "data", "optimizer")
    agreed = {name: getattr(config, name) for name in names}
    return {**msgspec.to_builtins(agreed), **extra}


def dump(config: Config) -> str:
    """Return the whole configuration as TOML."""
    lines: list[str] = []
    for section, options in msgspec.to_builtins(config).items():
        if options is None or options == {}:
            continue
        lines.append(f"[{section}]")
        lines += [f"{_key(key)} = {_toml(value)}" for key, value in options.items() if value is not None]
        lines.append("")
    return "\n".join(lines)


def _key(name: str) -> str:
    return name if re.fullmatch(r"[A-Za-z0-9_-]+", name) else _toml(name)


def _toml(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return msgspec.json.encode(value).decode()  # a JSON string is a TOML basic string
    if isinstance(value, list | tuple):
        return "[" + ", ".join(_toml(item) for item in value) + "]"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{k} = {_toml(item)}" for k, item in value.items() if item is not None) + "}"
    return repr(value)
