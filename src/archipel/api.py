"""What users import: `Learner` or `Peer` around their own loop, and the weights that a syncer starts from."""

from pathlib import Path

from torch import nn

from .protocol.schedule import SyncOptions
from .roles.learner import Learner
from .roles.peer import Peer
from .roles.result import save_tensors
from .train.parameters import synchronised

__all__ = ["Learner", "Peer", "save_weights"]


def save_weights(model: nn.Module, path: str | Path, options: SyncOptions | None = None) -> None:
    """Write the weights that a run of your own model starts from: `archipel syncer run.toml --init PATH`."""
    found = synchronised(model, options or SyncOptions())
    buffers = " ".join(name for name, (_, kind) in found.items() if kind == "buffer")
    save_tensors(
        {name: tensor.detach().cpu() for name, (tensor, _) in found.items()}, Path(path), {"buffers": buffers}
    )
