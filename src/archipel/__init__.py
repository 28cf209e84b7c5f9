"""archipel: train one network on islands of compute that fail, differ in speed and sit far apart."""

from importlib import import_module
from typing import Any

__version__ = "0.1.0"
__all__ = ["Learner", "Peer", "save_weights"]


def __getattr__(name: str) -> Any:
    """Load the public names when asked for: the command line's help must not import torch."""
    if name in __all__:
        return getattr(import_module(".api", __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
