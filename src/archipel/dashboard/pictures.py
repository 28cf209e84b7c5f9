"""Pictures for print: a run's timeline, losses, goodput, bandwidth, an experiment.

Each function takes plain data and returns a matplotlib figure; `save` writes it, SVG, PDF or PNG by suffix.
matplotlib is the extra `plots` and is imported only here, only when something is drawn. Colours are Okabe and
Ito's, which colour-blind people can tell apart; no legend lies over data.

Invariants: same data, same bytes; nothing global is touched.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import ConfigError
from .timeline import Merging, Row, Scene

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

SUFFIXES = (".svg", ".pdf", ".png")
BLACK, ORANGE, SKY, GREEN, YELLOW, BLUE, RED, PINK = (
    "#000000", "#E69F00", "#56B4E9", "#009E73", "#F0E442", "#0072B2", "#D55E00", "#CC79A7",
)  # fmt: skip
LINES = (BLUE, ORANGE, GREEN, RED, PINK, SKY, BLACK)
DOTS = (0, (1, 2))
DASHES = ("-", "--", "-.", ":")
GREY, PALE = "#6B6B6B", "#D9D9D9"
STEP, STEP_PALE, GRANTED = "#B4D8EE", "#CFE6F5", "#FBEFD2"
STOOD: dict[str, Any] = {"facecolor": "#F2F2F2", "edgecolor": "#A0A0A0", "hatch": "////", "linewidth": 0.3}
MARK: dict[str, Any] = {"markersize": 4.6, "markeredgewidth": 0.8, "linestyle": "none"}
STYLE = {
    "font.size": 9.0,
    "axes.titlesize": 10.0,
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": GREY,
    "axes.grid": True,
    "grid.color": "#E5E5E5",
    "grid.linewidth": 0.6,
    "axes.axisbelow": True,
    "legend.frameon": False,
    "legend.fontsize": 8.5,
    "lines.linewidth": 1.6,
    "hatch.linewidth": 0.5,
    "savefig.dpi": 160,
    "svg.hashsalt": "archipel",
    "pdf.fonttype": 42,
}


def _matplotlib() -> Any:
    try:
        import matplotlib
    except ImportError as error:
        raise ConfigError('drawing needs matplotlib: pip install -e ".[plots]" in a checkout') from error
    return matplotlib


def _sheet(width: float, height: float, rows: int = 1, columns: int = 1) -> "tuple[Figure, list[Axes]]":
    """Return a figure of this size in inches and its axes. Call within the style."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    return figure, list(figure.subplots(rows, columns, squeeze=False).flat)


def check(path: str | Path) -> Path:
    """Return the path if a picture can be written there. ConfigError for a suffix that is none of ours."""
    path = Path(path)
    if path.suffix.lower() not in SUFFIXES:
        raise ConfigError(f"{path} must end in one of {', '.join(SUFFIXES)}: that decides the format")
    _matplotlib()
    return path


def save(figure: "Figure", path: str | Path) -> None:
    """Write the picture; the folder must be there."""
    path = check(path)
    date = {".svg": {"Date": None}, ".pdf": {"CreationDate": None}}.get(path.suffix.lower(), {})
    with _matplotlib().rc_context(STYLE):
        figure.savefig(path, metadata=date)


# ---- a run's timeline ----

ROW = 0.74  # height of a learner's bar, of the distance between two rows
LANE = 0.42  # height of a round's bar
CROWD = 60  # steps of one learner, above which marks would lie on each other
NUMBERS = 55  # small numbers that fit beside each other from left to right


def timeline(scene: Scene, title: str = "") -> "Figure":
    """Draw a row of steps per learner, and below them the syncer's ticks and rounds, from left to right.

    Where a learner has more than 60 steps in the window, marks and numbers are left out: nobody could read
    them.
    """
    with _matplotlib().rc_context(STYLE):
        lanes = _lanes(scene.rounds)
        deep = 0 if scene.gossip else max(lanes, default=0) + 1
        figure, (axes,) = _sheet(10.0, 1.9 + 0.34 * len(scene.rows) + 0.2 * deep)
        marked = scene.crowd <= CROWD
        for place, row in enumerate(scene.rows):
            _row(axes, row, -place, scene, marked=marked)
        names = {-place: row.worker for place, row in enumerate(scene.rows)}
        floor = -len(scene.rows) - 0.15
        bottom = floor + 0.55 if scene.gossip else floor - 0.75 - 0.5 * deep
        if not scene.gossip:
            _ticks(axes, scene, floor, marked=marked)
            _rounds(axes, scene, floor - 0.75, lanes, marked=marked)
            _absent(axes, scene.syncer, floor, scene)
            names |= {floor: "syncer: grace", floor - 0.75 - 0.25 * (deep - 1): "rounds"}
        width_s = scene.window.end - scene.window.start
        axes.set_xlim(_x(scene, scene.window.start - width_s / 150), _x(scene, scene.window.end))
        axes.set_ylim(bottom, 0.95 if marked and scene.ticks else 0.5)
        axes.set_yticks(list(names), list(names.values()))
        axes.tick_params(axis="y", length=0)
        axes.grid(False, axis="y")
        axes.spines["left"].set_visible(False)
        axes.set_xlabel("seconds from the start of the run")
        axes.set_title(title)
        _key(figure, scene, marked=marked)
    return figure


def _x(scene: Scene, at: float) -> float:
    return at - scene.window.zero


def _row(axes: "Axes", row: Row, y: float, scene: Scene, *, marked: bool) -> None:
    """Draw one learner."""
    low, high = y - ROW / 2, y + ROW / 2
    edge = 0.4 if marked else 0.0
    for shade, colour in enumerate((STEP_PALE, STEP)):
        bars = [(_x(scene, step.steps_from), step.end - step.steps_from) for step in row.steps[shade::2]]
        axes.broken_barh(bars, (low, ROW), facecolor=colour, edgecolor="white", linewidth=edge)
    stood = [(_x(scene, step.start), step.steps_from - step.start) for step in row.steps]
    stood = [bar for bar in stood if bar[1] > 0]
    axes.broken_barh(stood, (low, ROW), **STOOD)
    if marked:
        for merged in (True, False):
            at = [_x(scene, each.at) for each in row.pushed if each.merged is merged]
            face = BLUE if merged else "white"
            axes.plot(at, [high - 0.17] * len(at), "^", color=BLUE, markerfacecolor=face, **MARK)
        at = [_x(scene, each.at) for each in row.landed]
        axes.plot(at, [low + 0.17] * len(at), "v", color=RED, markerfacecolor=RED, **MARK)
    _absent(axes, row, y, scene)


def _absent(axes: "Axes", row: Row, y: float, scene: Scene) -> None:
    """Draw when there was no process, and where one died."""
    for absent in row.absent:
        axes.plot([_x(scene, at) for at in absent], [y, y], color=GREY, linewidth=1.0, linestyle=DOTS)
    at = [_x(scene, each) for each in row.died]
    axes.plot(at, [y] * len(at), "X", color=BLACK, markersize=7.5, markeredgecolor="white",
              markeredgewidth=0.7, linestyle="none")  # fmt: skip


def _ticks(axes: "Axes", scene: Scene, y: float, *, marked: bool) -> None:
    """Draw each tick's wait within its window, and a line through all rows where it closed."""
    granted = [(_x(scene, tick.at - tick.waited_s), tick.window_s) for tick in scene.ticks]
    waited = [(_x(scene, tick.at - tick.waited_s), tick.waited_s) for tick in scene.ticks]
    edge = 0.4 if marked else 0.0
    axes.broken_barh(granted, (y - 0.22, 0.44), facecolor=GRANTED, edgecolor=ORANGE, linewidth=edge)
    axes.broken_barh(waited, (y - 0.22, 0.44), facecolor=ORANGE, linewidth=0)
    for tick in scene.ticks if marked else ():
        axes.plot([_x(scene, tick.at)] * 2, [y - 0.3, 0.5], color=PALE, linewidth=0.6, zorder=0.5)
    for tick in _apart(scene, scene.ticks, lambda tick: tick.at) if marked else ():
        place = (_x(scene, tick.at), 0.55)
        axes.text(*place, str(tick.tick), ha="center", va="bottom", fontsize=6.5, color=GREY)


def _apart(scene: Scene, marks: Sequence[Any], at: Callable[[Any], float]) -> list[Any]:
    """Return those marks in the window that leave room for a small number beside each."""
    least_s = (scene.window.end - scene.window.start) / NUMBERS
    found: list[Any] = []
    for mark in marks:
        inside = scene.window.start <= at(mark) <= scene.window.end
        if inside and (not found or at(mark) - at(found[-1]) >= least_s):
            found.append(mark)
    return found


def _lanes(rounds: Sequence[Merging]) -> list[int]:
    """Return for each round the first lane that is free when it begins."""
    free: list[float] = []
    lanes = []
    for each in rounds:
        lane = next((lane for lane, until in enumerate(free) if until <= each.start), len(free))
        free[lane : lane + 1] = [each.end]
        lanes.append(lane)
    return lanes


def _rounds(axes: "Axes", scene: Scene, top: float, lanes: Sequence[int], *, marked: bool) -> None:
    """Draw each round with its fragment's number."""
    for each, lane in zip(scene.rounds, lanes, strict=True):
        y, start = top - 0.5 * lane, _x(scene, each.start)
        failed = each.version < 0
        axes.broken_barh([(start, each.end - each.start)], (y - LANE / 2, LANE),
                         facecolor="white" if failed else GREEN, edgecolor=RED if failed else GREEN,
                         linewidth=1.0)  # fmt: skip
    for lane in sorted(set(lanes)) if marked else ():
        mine = [each for each, its in zip(scene.rounds, lanes, strict=True) if its == lane]
        for each in _apart(scene, mine, lambda each: each.end):
            place = (_x(scene, each.end), top - 0.5 * lane)
            axes.annotate(str(each.fragment), place, (1.5, 0), va="center", fontsize=6.5,
                          textcoords="offset points")  # fmt: skip


def _key(figure: "Figure", scene: Scene, *, marked: bool) -> None:
    """Explain below the axes what is drawn."""
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    def mark(shape: str, colour: str, face: str) -> Line2D:
        return Line2D([], [], marker=shape, color=colour, markerfacecolor=face, **MARK)

    rows, pushes = [*scene.rows, scene.syncer], [each for row in scene.rows for each in row.pushed]
    died, absent = any(row.died for row in rows), any(row.absent for row in rows)
    stood = any(step.steps_from > step.start for row in scene.rows for step in row.steps)
    failed = any(each.version < 0 for each in scene.rounds)
    synced = not scene.gossip
    sent, landed = (
        ("model sent", "round settled") if scene.gossip else ("fragment pushed, merged", "update landed")
    )
    known = [
        (True, "inner steps", Patch(facecolor=STEP)),
        (stood, "stood still", Patch(**STOOD)),
        (marked, sent, mark("^", BLUE, BLUE)),
        (marked and not all(each.merged for each in pushes), "pushed, not merged", mark("^", BLUE, "white")),
        (marked, landed, mark("v", RED, RED)),
        (died, "died", mark("X", BLACK, BLACK)),
        (absent, "absent", Line2D([], [], color=GREY, linewidth=1.0, linestyle=DOTS)),
        (synced, "grace granted", Patch(facecolor=GRANTED, edgecolor=ORANGE, linewidth=0.4)),
        (synced, "grace used", Patch(facecolor=ORANGE)),
        (synced, "round, with its fragment" if marked else "round", Patch(facecolor=GREEN)),
        (failed, "round abandoned", Patch(facecolor="white", edgecolor=RED)),
        (synced and marked, "tick closed, with its number", Line2D([], [], color=PALE, linewidth=1.2)),
    ]
    shown = [(handle, name) for there, name, handle in known if there]
    handles, names = [handle for handle, _ in shown], [name for _, name in shown]
    columns = -(-len(shown) // 2) if len(shown) > 6 else len(shown)
    figure.legend(handles, names, loc="outside lower center", ncols=columns, columnspacing=1.4,
                  handletextpad=0.6)  # fmt: skip


# ---- losses ----


@dataclass(frozen=True)
class Curve:
    """Validation losses of one run: seconds from its start, losses."""

    name: str
    at_s: Sequence[float]
    loss: Sequence[float]


def loss(curves: Sequence[Curve], title: str = "") -> "Figure":
    """Draw validation loss against time, a line per run; logarithmic where it falls by more than half."""
    with _matplotlib().rc_context(STYLE):
        from matplotlib.ticker import MaxNLocator, NullLocator

        figure, (axes,) = _sheet(7.0, 4.2)
        unit, size = _unit(max((curve.at_s[-1] for curve in curves if curve.at_s), default=1.0))
        for number, curve in enumerate(curves):
            colour, dash = LINES[number % len(LINES)], DASHES[number // len(LINES) % len(DASHES)]
            few = len(curve.at_s) <= 60
            axes.plot([at / size for at in curve.at_s], curve.loss, dash, color=colour, label=curve.name,
                      marker="o" if few else None, markersize=2.8)  # fmt: skip
        axes.set_xlabel(f"{unit} from the start of the run")
        axes.set_ylabel("validation loss")
        axes.set_xlim(left=0)
        values = [value for curve in curves for value in curve.loss if value > 0]
        if values and max(values) > 2 * min(values):
            axes.set_yscale("log")
            axes.yaxis.set_major_locator(MaxNLocator(8))
            axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
            axes.yaxis.set_minor_locator(NullLocator())
        if len(curves) > 1:
            axes.legend(loc="center left", bbox_to_anchor=(1.01, 0.5), borderaxespad=0.0)
        axes.set_title(title or (curves[0].name if len(curves) == 1 else ""))
    return figure


def _unit(longest_s: float) -> tuple[str, float]:
    """Return the unit of time that a span is best told in, and its seconds."""
    for unit, size in (("days", 86400.0), ("hours", 3600.0), ("minutes", 60.0)):
        if longest_s >= 2 * size:
            return unit, size
    return "seconds", 1.0


# ---- goodput of fleets ----


@dataclass(frozen=True)
class Fleets:
    """Shares in percent by row, for these numbers of chips: simulated here, and as the paper prints them."""

    chips: Sequence[int]
    goodput: Mapping[str, Sequence[float]]
    uptime: Mapping[str, Sequence[float]]
    paper_goodput: Mapping[str, Sequence[float]]
    paper_uptime: Mapping[str, Sequence[float]]


def goodput(fleets: Fleets, title: str = "") -> "Figure":
    """Draw goodput and uptime against chips: lines are simulated, marks are the paper's."""
    with _matplotlib().rc_context(STYLE):
        from matplotlib.lines import Line2D

        figure, panels = _sheet(8.6, 3.9, columns=2)
        data = (("goodput, %", fleets.goodput, fleets.paper_goodput),
                ("uptime, %", fleets.uptime, fleets.paper_uptime))  # fmt: skip
        for axes, (label, found, printed) in zip(panels, data, strict=True):
            for number, row in enumerate(found):
                axes.plot(fleets.chips, found[row], color=LINES[number % len(LINES)], label=row)
                axes.plot(fleets.chips, printed[row], "o", color=LINES[number % len(LINES)], markersize=5,
                          markerfacecolor="white", markeredgewidth=1.2, linestyle="none")  # fmt: skip
            axes.set_xscale("log", base=2)
            axes.set_xticks(list(fleets.chips), [_chips(count) for count in fleets.chips])
            axes.minorticks_off()
            axes.set_ylim(0, 103)
            axes.set_xlabel("chips, each failing once a year")
            axes.set_ylabel(label)
        handles, names = panels[0].get_legend_handles_labels()
        ways = [Line2D([], [], color=GREY), Line2D([], [], color=GREY, marker="o", markerfacecolor="white",
                                                   linestyle="none")]  # fmt: skip
        figure.legend([*handles, *ways], [*names, "simulated", "paper, Table 1"], loc="outside right center")
        _headline(figure, title)
    return figure


def _chips(count: int) -> str:
    return f"{count / 1e6:g}M" if count >= 1e6 else f"{count / 1e3:g}k"


# ---- bandwidth ----


@dataclass(frozen=True)
class Demand:
    """Compute utilisation of one method over bandwidths; `paper`: (Gbit/s, utilisation) as printed."""

    name: str
    gbit_s: Sequence[float]
    utilisation: Sequence[float]
    paper: Sequence[tuple[float, float]] = ()


def bandwidth(demands: Sequence[Demand], title: str = "") -> "Figure":
    """Draw compute utilisation against the bandwidth of each site: lines are the model, marks the paper's."""
    with _matplotlib().rc_context(STYLE):
        from matplotlib.lines import Line2D

        figure, (axes,) = _sheet(7.6, 4.0)
        for number, demand in enumerate(demands):
            colour = LINES[number % len(LINES)]
            axes.plot(demand.gbit_s, [100 * share for share in demand.utilisation], color=colour,
                      label=demand.name)  # fmt: skip
            if demand.paper:
                axes.plot([gbit for gbit, _ in demand.paper], [100 * share for _, share in demand.paper], "o",
                          color=colour, markerfacecolor="white", markersize=5, markeredgewidth=1.2,
                          linestyle="none")  # fmt: skip
        axes.set_xscale("log")
        axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
        axes.margins(x=0)
        axes.set_ylim(0, 103)
        axes.set_xlabel("bandwidth of each site, Gbit/s")
        axes.set_ylabel("compute utilisation, %")
        axes.set_title(title)
        handles, names = axes.get_legend_handles_labels()
        if any(demand.paper for demand in demands):
            handles.append(Line2D([], [], color=GREY, marker="o", markerfacecolor="white", linestyle="none"))
            names.append("paper, Table 13")
        axes.legend(handles, names, loc="center left", bbox_to_anchor=(1.01, 0.5), borderaxespad=0.0)
    return figure


# ---- experiments ----


@dataclass(frozen=True)
class Variant:
    """One variant of an experiment at one number of learners: the final losses of its seeds."""

    name: str
    learners: int
    losses: Sequence[float]


def experiment(variants: Sequence[Variant], title: str = "") -> "Figure":
    """Draw every seed's final loss and their mean, a row per variant, a panel per number of learners."""
    with _matplotlib().rc_context(STYLE):
        from matplotlib.lines import Line2D

        counts = sorted({variant.learners for variant in variants})
        names = list(dict.fromkeys(variant.name for variant in variants))
        figure, panels = _sheet(3.0 + 3.2 * len(counts), 1.3 + 0.26 * len(names), columns=len(counts))
        for axes, count in zip(panels, counts, strict=True):
            for variant in variants:
                if variant.learners == count:
                    y, mean = -names.index(variant.name), sum(variant.losses) / len(variant.losses)
                    axes.plot(variant.losses, [y] * len(variant.losses), "o", color=BLUE, markersize=4.5,
                              markerfacecolor="white", linestyle="none")  # fmt: skip
                    axes.plot([mean, mean], [y - 0.3, y + 0.3], color=RED, linewidth=1.8)
            axes.set_title(f"M = {count}")
            axes.set_xlabel("final validation loss")
            axes.set_ylim(-len(names) + 0.4, 0.6)
            axes.set_yticks(
                [-place for place in range(len(names))], names if axes is panels[0] else [""] * len(names)
            )
            axes.tick_params(axis="y", length=0)
        ways = [
            Line2D([], [], color=BLUE, marker="o", markerfacecolor="white", linestyle="none"),
            Line2D([], [], color=RED, marker="|", markersize=10, markeredgewidth=1.8, linestyle="none"),
        ]
        figure.legend(ways, ["a seed", "mean over seeds"], loc="outside lower center", ncols=2)
        _headline(figure, title)
    return figure


def _headline(figure: "Figure", title: str) -> None:
    """Put the title over all panels, left."""
    if title:
        figure.suptitle(title, x=0.01, ha="left", fontsize=10)
