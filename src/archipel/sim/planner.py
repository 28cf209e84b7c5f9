"""What to run on a given cluster: M, K, P, H, τ and bits from chips, failures, model, step time, sites and
links.

Goodput comes from `goodput.closed_form` (the recommendation is simulated as well), data parallel's
utilisation from `bandwidth`, and what our own syncer sends from here: it sits at one site, a round pulls one
fragment from every learner and sends the merged one back, so the busiest link is the one of the syncer's
site.

A learner never waits for the network (τ ≥ 1). Where the link is too slow, rounds come later and H grows by
1 / utilisation instead; the column states what waiting would cost, as the paper's table does.

Invariants: a pure function of options and seed; every candidate that was weighed stands in the table; what
rests on fitted constants says so.
"""

import math
from collections.abc import Iterator
from typing import Any, Literal

from msgspec import Struct, to_builtins

from ..errors import ConfigError
from ..protocol.schedule import CodecName
from . import baselines, goodput
from .bandwidth import Exchange, needed_gbit_s, utilisation
from .hardware import HardwareOptions, slices_per_learner

_DEFAULT = HardwareOptions()
FRAGMENTS = 24  # P: the paper's
BITS: dict[CodecName, float] = {
    # With one 16-bit scale in 128 elements where there is one.
    "float32": 32.0,
    "bf16": 16.0,
    "int8": 8.125,
    "int4": 4.125,
    "e3m0": 4.125,
}
_DATA_PARALLEL_TARGET = 0.95  # utilisation that data parallel's bandwidth is stated for
_WORTH_MORE_LEARNERS = 0.01  # goodput that justifies more learners: quality falls a little with M


class Setting(Struct, frozen=True):
    """How often, with how much overlap and in how many bits fragments are exchanged."""

    interval_steps: int = 24  # H
    overlap_steps: int = 2  # τ
    push_codec: CodecName = "bf16"
    update_codec: CodecName = "float32"


_CODECS: tuple[tuple[CodecName, CodecName], ...] = (
    ("bf16", "float32"),
    ("bf16", "bf16"),
    ("int8", "bf16"),
    ("int4", "bf16"),
)  # (push, update)
# From what costs the model least to what costs it most: fewer bits, then longer overlap, then rarer exchange.
SETTINGS = tuple(
    Setting(interval, overlap, push, update)
    for interval in (24, 48, 96, 192)
    for overlap in (2, 4, 8)
    for push, update in _CODECS
)


class PlanOptions(Struct, frozen=True, forbid_unknown_fields=True):
    """Section `[plan]`: what there is to run on, and what is to be trained."""

    chips: int = 1024
    parameters: float = 5e9
    step_s: float = 1.0  # compute of one inner step
    sites: int = 2
    link_gbit_s: float = 10.0  # of each site, each way; with one site: of the syncer's machine
    link_latency_s: float = 0.03  # one way
    link_share: float = 0.8  # share of the link that training may fill
    learners_max: int = 16  # the paper has no results beyond
    mtbi_s: float = _DEFAULT.mtbi_s
    slice_chips: int = _DEFAULT.slice_chips
    downscale_s: float = _DEFAULT.downscale_s  # fitted to Table 1: replace by your own
    upscale_s: float = _DEFAULT.upscale_s  # fitted to Table 1
    return_s: float = _DEFAULT.return_s  # fitted to Table 1

    def __post_init__(self) -> None:
        """ConfigError names the first option that makes no sense; the hardware's class checks its own."""
        for name in ("parameters", "link_gbit_s", "link_share"):
            value = getattr(self, name)
            if not 0 < value < math.inf:
                raise ConfigError(f"plan.{name}={value} is not positive: use a finite value above 0")
        if self.link_share > 1:
            raise ConfigError(f"plan.link_share={self.link_share} exceeds the link: use at most 1")
        if not 0 <= self.link_latency_s < math.inf:
            raise ConfigError(f"plan.link_latency_s={self.link_latency_s} is negative: use 0 or more")
        if self.sites < 1:
            raise ConfigError(f"plan.sites={self.sites} is below 1: use the number of places with chips")
        least = max(2, self.sites)
        if self.learners_max < least:
            raise ConfigError(
                f"plan.learners_max={self.learners_max} is below {least}: a plan needs two learners, "
                f"and one at each of plan.sites={self.sites}; raise it"
            )
        if self.chips < least:
            raise ConfigError(f"plan.chips={self.chips} is below {least}: a learner needs at least one chip")
        hardware(self, 1)


class Candidate(Struct, frozen=True):
    """One row of the table behind a plan."""

    method: Literal["data parallel", "decoupled"]
    learners: int
    interval_steps: int  # H
    overlap_steps: int  # τ
    push_codec: CodecName
    update_codec: CodecName
    goodput: float  # share of chip time in useful steps, links aside
    uptime: float
    all_up: float  # share of time in which every learner steps: what K = M would be left with
    utilisation: float  # share of a step that is compute on this link, if learners waited
    needed_gbit_s: float  # on the busiest link; data parallel: for 95 % utilisation
    fits: bool

    @property
    def useful(self) -> float:
        """Share of chip time in useful steps, waiting for links included."""
        return self.goodput * self.utilisation


class Plan(Struct, frozen=True):
    """A recommendation, why, and what it was chosen from."""

    learners: int  # M
    quorum: int  # K
    fragments: int  # P
    interval_steps: int  # H
    overlap_steps: int  # τ
    push_codec: CodecName
    update_codec: CodecName
    goodput: float  # closed form
    goodput_simulated: float
    uptime_simulated: float
    needed_gbit_s: float
    recovery_gbit_s: float  # that a returning learner adds, to be back within H rounds
    fits: bool
    limits: tuple[str, ...]
    table: tuple[Candidate, ...]
    constants: dict[str, dict[str, object]]


def plan(options: PlanOptions, seed: int = 0) -> Plan:
    """Return the recommended settings: the fewest learners within a point of the best goodput that the link
    bears.

    Among settings of one M, the first that fits, from the least to the most costly for the model.
    """
    table = tuple(_candidates(options))
    chosen = _choose([row for row in table if row.method == "decoupled"])
    simulated = goodput.simulate(hardware(options, chosen.learners), seed)
    return Plan(
        learners=chosen.learners,
        quorum=1,
        fragments=FRAGMENTS,
        interval_steps=chosen.interval_steps,
        overlap_steps=chosen.overlap_steps,
        push_codec=chosen.push_codec,
        update_codec=chosen.update_codec,
        goodput=chosen.goodput,
        goodput_simulated=simulated.goodput,
        uptime_simulated=simulated.uptime,
        needed_gbit_s=chosen.needed_gbit_s,
        # Appendix E.3: state of 3N values (weights, two moments), in the time of H rounds.
        recovery_gbit_s=3 * options.parameters * 32 / 1e9 / (chosen.interval_steps * options.step_s),
        fits=chosen.fits,
        limits=tuple(_limits(options, chosen, table)),
        table=table,
        constants=_constants(options),
    )


def hardware(options: PlanOptions, learners: int) -> HardwareOptions:
    """Return the cluster split into so many learners."""
    return HardwareOptions(
        chips=options.chips,
        learners=learners,
        slice_chips=options.slice_chips,
        mtbi_s=options.mtbi_s,
        step_s=options.step_s,
        downscale_s=options.downscale_s,
        upscale_s=options.upscale_s,
        return_s=options.return_s,
    )


def _choose(rows: list[Candidate]) -> Candidate:
    """Return the row to recommend: fitting rows first, then as few learners as cost no goodput."""
    fitting = [row for row in rows if row.fits] or rows
    best = max(row.useful for row in fitting)
    good = [row for row in fitting if row.useful >= best - _WORTH_MORE_LEARNERS]
    return min(good, key=lambda row: row.learners)


def _candidates(options: PlanOptions) -> Iterator[Candidate]:
    """Yield elastic data parallel, then one row for every M: as many learners at each site, doubling."""
    yield _data_parallel(options)
    per_site = 1 if options.sites > 1 else 2
    while (learners := per_site * options.sites) <= min(options.learners_max, options.chips):
        yield _decoupled(options, learners)
        per_site *= 2


def _data_parallel(options: PlanOptions) -> Candidate:
    exchange = Exchange(
        method="dp",
        parameters=options.parameters,
        step_s=options.step_s,
        sites=options.sites,
        latency_s=options.link_latency_s,
        interval_steps=1,
        fragments=1,
    )
    useful, up = goodput.closed_form(hardware(options, 1))
    needed = needed_gbit_s(exchange, _DATA_PARALLEL_TARGET)
    usable = options.link_gbit_s * options.link_share
    return Candidate(
        method="data parallel",
        learners=1,
        interval_steps=1,
        overlap_steps=0,
        push_codec="bf16",
        update_codec="bf16",
        goodput=useful,
        uptime=up,
        all_up=up,
        utilisation=utilisation(exchange, usable),
        needed_gbit_s=needed,
        fits=needed <= usable,
    )


def _decoupled(options: PlanOptions, learners: int) -> Candidate:
    """Return the first of the settings that the link bears, or else the last and lightest."""
    usable = options.link_gbit_s * options.link_share
    needs = [round_gbit_s(options, learners, setting) for setting in SETTINGS]
    # If none fits: the one that misses by least.
    chosen = next((i for i, need in enumerate(needs) if need <= usable), needs.index(min(needs)))
    setting = SETTINGS[chosen]
    imagined = hardware(options, learners)
    useful, up = goodput.closed_form(imagined)
    return Candidate(
        method="decoupled",
        learners=learners,
        interval_steps=setting.interval_steps,
        overlap_steps=setting.overlap_steps,
        push_codec=setting.push_codec,
        update_codec=setting.update_codec,
        goodput=useful,
        uptime=up,
        all_up=goodput.learner_uptime(imagined) ** learners,
        utilisation=min(1.0, usable / needs[chosen]),
        needed_gbit_s=needs[chosen],
        fits=needs[chosen] <= usable,
    )


def round_gbit_s(options: PlanOptions, learners: int, setting: Setting) -> float:
    """Return the bandwidth that the syncer's site needs so that rounds neither queue nor come late, Gbit/s
    each way.

    Two conditions: one fragment of every remote learner, there and back with three messages' latency, within
    τ steps; and all fragments, each way, within H steps. Infinite where latency alone takes τ steps.
    """
    remote = learners - learners // options.sites if options.sites > 1 else learners
    pushes_gbit = remote * options.parameters * BITS[setting.push_codec] / 1e9
    updates_gbit = remote * options.parameters * BITS[setting.update_codec] / 1e9
    in_time_s = setting.overlap_steps * options.step_s - 3 * options.link_latency_s
    if in_time_s <= 0:
        return math.inf
    late = (pushes_gbit + updates_gbit) / FRAGMENTS / in_time_s
    queue = max(pushes_gbit, updates_gbit) / (setting.interval_steps * options.step_s)
    return max(late, queue)


def _limits(options: PlanOptions, chosen: Candidate, table: tuple[Candidate, ...]) -> Iterator[str]:
    """Yield one sentence for each thing that holds the plan back, strongest first."""
    usable = options.link_gbit_s * options.link_share
    if not chosen.fits:
        yield (
            f"link: the lightest settings need {chosen.needed_gbit_s:.3g} Gbit/s, {usable:.3g} are usable; "
            f"rounds will come {1 / max(chosen.utilisation, 1e-9):.1f} times more rarely than planned"
        )
    preferred = round_gbit_s(options, chosen.learners, SETTINGS[0])
    if chosen.fits and preferred > usable:
        yield (
            f"link: H=24, tau=2 with bf16 pushes and float32 updates would need {preferred:.3g} Gbit/s, "
            f"{usable:.3g} are usable"
        )
    if chosen.overlap_steps > 2:
        yield (
            f"latency and link: a round takes more than 2 steps of {options.step_s:g} s, "
            f"hence tau={chosen.overlap_steps}; consider sync.local_share=0.5 with so long an overlap"
        )
    if chosen.goodput < 0.95:
        yield (
            f"failures: {100 * (1 - chosen.goodput):.1f} % of chip time is lost although {chosen.learners} "
            "learners stop apart; shorter reconfigurations or smaller learners would win it back"
        )
    yield from _notes(options, chosen, table)


def _notes(options: PlanOptions, chosen: Candidate, table: tuple[Candidate, ...]) -> Iterator[str]:
    if slices_per_learner(hardware(options, chosen.learners)) == 1:
        yield (
            f"slices: a learner is a single slice of {options.chips // chosen.learners} chips, so one failed "
            "chip stops all of it until it returns"
        )
    if options.sites > 1 and chosen.learners == options.sites:
        state_gbit = 3 * options.parameters * 32 / 1e9
        yield (
            f"recovery: with one learner per site a returning one fetches {state_gbit:.3g} Gbit of weights "
            "and moments across the link; with two a neighbour can serve it"
        )
    alone = table[0]
    if alone.fits and alone.useful >= chosen.useful - _WORTH_MORE_LEARNERS:
        yield "nothing forces learners apart: elastic data parallel would do as well on these chips and links"
    if max(row.learners for row in table) == chosen.learners and chosen.goodput < 0.95:
        yield (
            f"learners: more than plan.learners_max={options.learners_max} might help; "
            "the paper tried 16 at most"
        )


def _constants(options: PlanOptions) -> dict[str, dict[str, object]]:
    """Return the constants behind the figures; what is not left at its default is the user's."""
    known = baselines.table1_constants()
    marked = {}
    for name, entry in known.items():
        value = getattr(options, name, entry["value"])
        source = entry["source"] if value == entry["value"] and name != "step_s" else "given in the options"
        marked[name] = {"value": value, "source": source}
    marked["backward_share"] = {"value": 2 / 3, "source": "first principles; hides data parallel's gradients"}
    return marked


def as_dict(result: Plan) -> dict[str, Any]:
    """Return a plan as plain values, for JSON; what is infinite (no link would do) becomes None."""
    return dict(_finite(to_builtins(result)))


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def render(result: Plan) -> str:
    """Return a plan as text for a terminal: the recommendation, what limits, the table, the constants."""
    lines = [
        f"M={result.learners} learners, K={result.quorum}, P={result.fragments}, H={result.interval_steps}, "
        f"tau={result.overlap_steps}, pushes {result.push_codec}, updates {result.update_codec}",
        f"goodput {100 * result.goodput_simulated:.1f} % simulated, {100 * result.goodput:.1f} % in closed "
        f"form; uptime {100 * result.uptime_simulated:.1f} %; {result.needed_gbit_s:.3g} Gbit/s on the "
        f"busiest link, {result.recovery_gbit_s:.3g} more while a learner recovers",
        "",
        "What limits:",
        *(f"  {limit}" for limit in result.limits or ("nothing: chips, links and latency all suffice",)),
        "",
        "  method          M    H tau  push update   goodput all up  util.  Gbit/s",
        *(_render_row(row, result) for row in result.table),
        "",
        "Constants:",
        *(f"  {name} = {entry['value']:g} ({entry['source']})" for name, entry in result.constants.items()),
    ]
    return "\n".join(lines)


def _render_row(row: Candidate, result: Plan) -> str:
    mark = ">" if row.method == "decoupled" and row.learners == result.learners else " "
    verdict = "" if row.fits else "  too much for the link"
    return (
        f"{mark} {row.method:13} {row.learners:3d} {row.interval_steps:4d} {row.overlap_steps:3d} "
        f"{row.push_codec:>5} {row.update_codec:>7} {100 * row.goodput:7.1f} % {100 * row.all_up:4.0f} % "
        f"{100 * row.utilisation:4.0f} % {row.needed_gbit_s:7.3g}{verdict}"
    )
