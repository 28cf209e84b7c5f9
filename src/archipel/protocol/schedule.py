"""Which fragment is due at which tick, and the options of synchronisation that all workers of a run share.

A fragment p has the offset t_p = floor(p·H/P) and is due at tick t when t mod H = t_p (Decoupled DiLoCo,
section 3; the order is free there, this one is ours). With P ≤ H the offsets are distinct.
"""

from typing import Any, Literal

from msgspec import Struct, convert

CodecName = Literal["float32", "bf16", "int8", "int4", "e3m0"]


class SyncOptions(Struct, frozen=True, forbid_unknown_fields=True):
    """Section `[sync]`: the syncer's word; every learner adopts it when it joins."""

    steps: int = 1000  # T: ticks of the run
    learners: int = 2  # M the run is planned for; more may join
    quorum: int = 1  # K
    quorum_live: bool = False  # take min(K, live learners)
    fragments: int = 24  # P
    interval_steps: int = 24  # H
    overlap_steps: int = 2  # τ; 0: blocking
    grace: bool = True  # adaptive grace window, eq. 3
    grace_margin: float = 0.9  # γ
    max_lead_steps: int | None = None  # make a learner wait when further ahead than this; None: never
    local_share: float = 0.0  # α: share of the local value kept when an update lands
    fragmentation: Literal["balanced", "layer", "tensor", "subtensor"] = "balanced"
    merge: Literal["radial_directional", "average"] = "radial_directional"
    merge_granularity: Literal["tensor", "row", "fragment"] = "tensor"
    embedding_merge: Literal["radial_directional", "average"] = "average"
    embedding_patterns: tuple[str, ...] = ("*embed*", "*lm_head*", "*wte*", "*wpe*")
    exclude: tuple[str, ...] = ()  # patterns of parameters that are never synchronised
    buffers: Literal["average", "local"] = "average"  # float buffers; others always stay local
    outer_lr: float = 0.7
    outer_momentum: float = 0.9
    nesterov: bool = True
    push_codec: CodecName = "bf16"
    update_codec: Literal["float32", "bf16"] = "float32"
    codec_block: int = 128  # elements that share a scale in int4, int8, e3m0
    error_feedback: bool = False  # add what the codec lost to the next push
    pulls_max: int = 4  # pushes under way at once; each takes a receive buffer at the syncer
    pull_deadline_s: float = 60.0  # until a learner's own transfer times are known
    heartbeat_s: float = 2.0  # a silent courier says so this often
    silence_s: float = 15.0  # nothing heard for so long: the member is gone
    checkpoint_rounds: int = 200  # rounds between two checkpoints of the syncer
    idle_exit_s: float = 0.0  # without any learner for so long the syncer ends; 0: it waits for ever

    @property
    def lead_steps(self) -> int | None:
        """How far past a due tick a learner may step before its update is there; None: it never waits."""
        return self.max_lead_steps if self.overlap_steps else 0

    @property
    def credit_max(self) -> int:
        """How many steps of a learner may wait to be counted.

        Where learners wait, every step must count once, or two of them wait for each other; where they never
        do, the newest report counts and a surplus is forgotten.
        """
        return 1 if self.lead_steps is None else self.interval_steps + self.lead_steps


def offset(fragment: int, options: SyncOptions) -> int:
    """Return t_p, the tick modulo H at which the fragment is due."""
    return fragment * options.interval_steps // options.fragments


def due(tick: int, options: SyncOptions) -> int | None:
    """Return the fragment due at a tick, or None. With P ≤ H there is at most one."""
    phase = tick % options.interval_steps
    guess = -(-phase * options.fragments // options.interval_steps)
    if guess < options.fragments and offset(guess, options) == phase:
        return guess
    return None


def due_between(first: int, last: int, options: SyncOptions) -> tuple[int, ...]:
    """Return the fragments due at ticks first … last, in that order, each once."""
    found = dict.fromkeys(due(tick, options) for tick in range(first, last + 1))
    return tuple(fragment for fragment in found if fragment is not None)


def options_of(settings: dict[str, Any]) -> SyncOptions:
    """Return the synchronisation options among a run's settings, as a syncer's welcome carries them."""
    return convert(settings["sync"], SyncOptions)
