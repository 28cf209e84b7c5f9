"""The papers' tables as text: what `simulate --paper` and `plan --paper` print without --json."""

from collections.abc import Callable, Sequence
from typing import Any


def aligned(heads: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    """Return a table: text to the left, numbers to the right, two blanks between; None is an empty cell.

    >>> print(aligned(["row", "value"], [["a", 1.5], ["bc", None]]))
    row  value
    a      1.5
    bc
    """
    texts = [["" if cell is None else str(cell) for cell in row] for row in (heads, *rows)]
    widths = [max(map(len, column)) for column in zip(*texts, strict=True)]
    left = [any(isinstance(row[column], str) for row in rows) for column in range(len(heads))]
    return "\n".join(
        "  ".join(
            cell.ljust(width) if to_left else cell.rjust(width)
            for cell, width, to_left in zip(row, widths, left, strict=True)
        ).rstrip()
        for row in texts
    )


def table1(found: dict[str, Any]) -> str:
    """Return goodput and uptime in percent, the paper's figures in brackets."""
    from ..sim import baselines

    heads = ["%", *(f"{chips:,} chips" for chips in baselines.TABLE1_CHIPS)]
    printed = {"goodput": baselines.PAPER_GOODPUT, "uptime": baselines.PAPER_UPTIME}
    rows = [
        [
            f"{figure}, {name}",
            *(f"{cell:6.2f} ({paper:g})" for cell, paper in zip(cells, printed[figure][name], strict=True)),
        ]
        for figure in printed
        for name, cells in found[figure].items()
    ]
    return f"{aligned(heads, rows)}\nsimulated here, the paper's in brackets; {found['seconds']} s"


def section3(found: dict[str, Any]) -> str:
    """Return setting, figure, what was measured, and what the specification says."""
    heads = ["setting", "figure", "measured", "specification", "deviation"]
    return aligned(heads, [[row[head] for head in heads] for row in found["rows"]])


def gasloc_rounds(found: dict[str, Any]) -> str:
    """Return the length of a round, in local steps, with one straggler."""
    heads = ["c", "r", "diloco", "fixed", "adapted", "none"]
    table = aligned(heads, [[row[head] for head in heads] for row in found["rows"]])
    return (
        f"{table}\nlocal steps a round takes; c: one model over a full link, in local steps; r: the "
        "straggler's share of it;\nfixed, adapted: gossip with the straggler's H as the others' or shorter; "
        "none: gossip without a straggler"
    )


def table13(found: dict[str, Any]) -> str:
    """Return Gbit/s per site for each utilisation; the paper's figures below ours where it prints them."""
    from ..sim import bandwidth

    heads = ["step_s", "sites", "method", "", *(f"{share:.0%}" for share in bandwidth.UTILISATIONS)]
    rows = []
    for row in found["rows"]:
        names = [row["step_s"], row["sites"], row["method"]]
        rows.append([*names, "here", *row["gbit_s"]])
        if row["paper"]:
            width = len(row["gbit_s"])
            rows.append([*names, "paper", *[*row["paper"], *[None] * width][:width]])
    return f"{aligned(heads, rows)}\nGbit/s per site for each compute utilisation"


PAPERS: dict[str, Callable[[dict[str, Any]], str]] = {
    "table1": table1,
    "section3": section3,
    "gasloc-rounds": gasloc_rounds,
    "table13": table13,
}
