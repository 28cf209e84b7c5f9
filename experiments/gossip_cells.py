"""Cells of experiments of kind "gossip": peers under the real protocol in virtual time, and what they are
compared with.

A variant's `method` is "gossip" (the default: GASLoC's forms and topologies, DiLoCo as the complete graph),
or a baseline of `numerics.baselines`: "local_dadam" (x' = W(x + g)), "overlapped" (x' = Wx + g; with one
local step this is DAdam, and "local_dadam" is ATC) or "noloco". Baselines run in a plain lock-step loop over
the same models, data, shards, inner optimizer, topology and figures; nothing of the protocol, no time and no
fault is in them. A variant's or the experiment's `local_steps` is H; peers take as many rounds as the tokens
give.
"""

import time
from typing import Any

import torch
from torch import Tensor

from archipel.config import Config, load
from archipel.numerics import baselines, mixing
from archipel.protocol import gossip as g
from archipel.protocol import messages as m
from archipel.protocol.topology import RoundKey, row_of
from archipel.roles.gossiping import Figures, LocalPeer, fitted, gossip_virtually, options_of

POINTS = 4  # of a curve
BASELINES = ("local_dadam", "overlapped", "noloco")
EPOCH = 1  # of the membership: the pairs are those of a calm run


def configured(experiment: dict[str, Any], cell: dict[str, Any]) -> Config:
    """Return a cell's configuration."""
    variant, peers = cell["variant"], cell["learners"]
    local_steps = variant.get("local_steps", experiment["local_steps"])
    steps = experiment["tokens"] // (experiment["batch"] * peers * experiment["sequence"])
    rounds = max(steps // local_steps, 1)
    first = [
        f"run.seed={cell['seed']}", f"gossip.peers={peers}", f"gossip.local_steps={local_steps}",
        f"gossip.rounds={rounds}", f"data.batch={experiment['batch']}",
        f"data.sequence={experiment['sequence']}", f"evaluate.every_rounds={max(rounds // POINTS, 1)}",
    ]  # fmt: skip
    filled = [text.replace("{M}", str(peers)) for text in variant["set"]]
    return load(None, [*first, *experiment["set"], *filled])


def run_cell(experiment: dict[str, Any], cell: dict[str, Any]) -> dict[str, Any]:
    """Train one cell and return its figures."""
    torch.set_num_threads(1)
    began = time.monotonic()
    config, method = configured(experiment, cell), cell["variant"].get("method", "gossip")
    if method == "gossip":
        figures, found = _by_protocol(config, cell["seed"])
    else:
        figures, found = _in_lock_step(config, method)
    last = figures.points[-1]
    return {
        **{name: last[name] for name in ("loss", "mean", "worst", "consensus_error", "accuracy")},
        **found,
        "points": figures.points,
        "seconds": round(time.monotonic() - began, 1),
    }


def _by_protocol(config: Config, seed: int) -> tuple[Figures, dict[str, Any]]:
    models = 0

    def watch(worker: str, now: float, event: m.Event, actions: list[m.Action]) -> None:
        nonlocal models
        models += sum(isinstance(a, m.Send) and isinstance(a.message, g.Model) for a in actions)

    outcome, figures = gossip_virtually(config, config.sim, seed=seed, watch=watch)
    options, told = options_of(config), outcome.figures()
    kept = ("complete", "rounds", "round_s", "virtual_s", "goodput", "merged_share", "late_models")
    return figures, {
        **{name: told[name] for name in kept},
        "tokens": told["tokens"]["consumed"],
        "models_sent": models / (options.peers * options.rounds),
    }


def _in_lock_step(config: Config, method: str) -> tuple[Figures, dict[str, Any]]:
    """Run a baseline: all take H steps, then all exchange."""
    assert method in BASELINES, method
    config, corpus = fitted(config)
    options = options_of(config)
    figures = Figures(config, list(corpus.validation(config.evaluate.batches, config.evaluate.batch)))
    names = sorted(f"peer-{number}" for number in range(options.peers))
    peers = {name: LocalPeer(config, corpus) for name in names}
    for name, peer in peers.items():
        peer.prepare({}, int(name.rpartition("-")[2]), 0)
    slow = {name: baselines.noloco_start(peer.state.anchor) for name, peer in peers.items()}
    tokens = models = 0
    for number in range(options.rounds):
        for peer in peers.values():
            for step in range(options.local_steps):
                tick = number * options.local_steps + step
                tokens += peer.step(tick + 1, tick)[0]
        key = RoundKey(config.run.seed, EPOCH, number)
        rows = {name: row_of(name, options.scheme, names, key, alpha=options.alpha) for name in names}
        reached = {name: peer.state.reached() for name, peer in peers.items()}
        anchors = {name: peer.state.anchor for name, peer in peers.items()}
        if method == "noloco":
            slow = _noloco(slow, reached, {name: row.partners for name, row in rows.items()}, options)
            after = {name: state.slow for name, state in slow.items()}
            models += sum(2 * len(row.partners) for row in rows.values())
        else:
            after = _local_dadam(anchors, reached, rows, overlapped=method == "overlapped")
            models += sum(len(row.partners) for row in rows.values())
        for name, peer in peers.items():
            peer.state.load(after[name])
            figures.note(number + 1, name, after[name])
    figures.close()
    return figures, {"tokens": tokens, "models_sent": models / (options.peers * options.rounds)}


def _local_dadam(
    anchors: dict[str, Tensor], reached: dict[str, Tensor], rows: dict[str, Any], *, overlapped: bool
) -> dict[str, Tensor]:
    sent = {
        name: baselines.local_dadam_sent(anchors[name], reached[name], overlapped=overlapped)
        for name in anchors
    }
    after = {}
    for name, row in rows.items():
        mixed = mixing.mix(sent[name], [sent[other] for other in row.partners], row.weights)
        after[name] = baselines.local_dadam(mixed, anchors[name], reached[name], overlapped=overlapped)
    return after


def _noloco(
    slow: dict[str, baselines.NoLoCoState],
    reached: dict[str, Tensor],
    partners: dict[str, tuple[str, ...]],
    options: g.GossipOptions,
) -> dict[str, baselines.NoLoCoState]:
    after = {}
    for name, state in slow.items():
        group = [(reached[one] - slow[one].slow, slow[one].slow) for one in sorted((name, *partners[name]))]
        after[name] = baselines.noloco(state, group, lr=options.outer_lr, momentum=options.momentum)
    return after


def summary(found: dict[int, Any]) -> str:
    """Return one line for a table: means over seeds."""

    def mean(name: str) -> float:
        return sum(each[name] for each in found.values()) / len(found)

    spread = max(each["loss"] for each in found.values()) - min(each["loss"] for each in found.values())
    return (
        f"loss of the mean model {mean('loss'):.4f} (range {spread:.4f}, {len(found)} seeds)  workers' mean "
        f"{mean('mean'):.4f}  worst {mean('worst'):.4f}  consensus error {mean('consensus_error'):.2%}  "
        f"models sent a round {mean('models_sent'):.2f}"
    )
