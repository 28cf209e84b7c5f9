"""The paper's Table 1: its rows as settings of the imagined hardware, its figures, and the fit of our
constants.

Data parallel is one learner that holds the whole cluster: "M=1 none" waits for the repair of every failed
slice, "M=1 elastic" goes on without it (Decoupled DiLoCo, section 3.3). The paper does not print its
reconfiguration and return times. Ours are fitted to the table, one set for all 60 cells, and labelled so
wherever they are shown.
"""

from collections.abc import Callable
from itertools import product

from msgspec.structs import asdict, replace

from .hardware import HardwareOptions

TABLE1_CHIPS = (150_000, 300_000, 600_000, 1_200_000, 2_400_000)
TABLE1_ROWS = ("M=1 none", "M=1 elastic", "M=2", "M=4", "M=8", "M=16")

# Percent, by row, for TABLE1_CHIPS: as printed in the paper.
PAPER_GOODPUT = {
    "M=1 none": (72, 57, 38, 27, 18),
    "M=1 elastic": (88, 80, 69, 58, 40),
    "M=2": (94, 88, 80, 70, 54),
    "M=4": (96, 93, 89, 82, 73),
    "M=8": (98, 96, 94, 88, 80),
    "M=16": (99, 98, 96, 93, 86),
}
PAPER_UPTIME = {
    "M=1 none": (72, 57, 38, 27, 18),
    "M=1 elastic": (88, 81, 69, 59, 42),
    "M=2": (100, 97, 96, 90, 80),
    "M=4": (100, 100, 99, 99, 99),
    "M=8": (100, 100, 100, 100, 99),
    "M=16": (100, 100, 100, 100, 99),
}

FITTED = ("downscale_s", "upscale_s", "return_s")
ASSUMED = ("step_s", "slice_chips", "return_shape", "return_exponent", "fails_while_stopped")
GIVEN = ("mtbi_s",)


def table1_options(row: str, chips: int, constants: HardwareOptions | None = None) -> HardwareOptions:
    """Return the hardware of one cell; whatever the row does not say is taken from `constants`."""
    learners = 1 if row.startswith("M=1 ") else int(row.removeprefix("M="))
    return replace(
        constants or HardwareOptions(),
        chips=chips,
        learners=learners,
        elastic=row != "M=1 none",
        capacity=None,
    )


def table1_constants() -> dict[str, dict[str, object]]:
    """Return the constants behind every cell, each with where it comes from: given, assumed or fitted."""
    values = asdict(HardwareOptions())
    sources = {"given by the paper": GIVEN, "assumed": ASSUMED, "fitted to Table 1": FITTED}
    return {name: {"value": values[name], "source": why} for why, names in sources.items() for name in names}


Predict = Callable[[HardwareOptions], tuple[float, float]]


def table1_errors(predict: Predict, constants: HardwareOptions | None = None) -> list[float]:
    """Return predicted minus printed, in points, for the 30 goodput cells and then the 30 uptime cells.

    predict: options to (goodput, uptime), shares of one.
    """
    goodput, uptime = [], []
    for row in TABLE1_ROWS:
        for column, chips in enumerate(TABLE1_CHIPS):
            useful, up = predict(table1_options(row, chips, constants))
            goodput.append(100 * useful - PAPER_GOODPUT[row][column])
            uptime.append(100 * up - PAPER_UPTIME[row][column])
    return goodput + uptime


def calibrate(predict: Predict, start: HardwareOptions | None = None) -> tuple[HardwareOptions, float]:
    """Return the constants with the smallest loss on Table 1, and that loss: the search behind the defaults.

    predict: usually `goodput.closed_form`, which has no noise; the simulation then confirms the result. The
    loss is the mean absolute error plus what the largest exceeds 3 points by. Grids of halving width, from 4
    s down.
    """
    best = start or HardwareOptions(downscale_s=12.0, upscale_s=10.0, return_s=60.0)
    least = _loss(table1_errors(predict, best))
    width_s = 4.0
    while width_s >= 0.5:
        centre = best
        for moves in product((-2, -1, 0, 1, 2), repeat=len(FITTED)):
            moved = {
                name: getattr(centre, name) + width_s * move
                for name, move in zip(FITTED, moves, strict=True)
            }  # fmt: skip
            if min(moved.values()) <= 0:
                continue
            candidate = replace(centre, **moved)
            loss = _loss(table1_errors(predict, candidate))
            if loss < least:
                best, least = candidate, loss
        if best is centre:
            width_s /= 2
    return best, least


def _loss(errors: list[float]) -> float:
    sizes = [abs(error) for error in errors]
    return sum(sizes) / len(sizes) + max(0.0, max(sizes) - 3.0)
