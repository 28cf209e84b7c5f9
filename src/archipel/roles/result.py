"""What a syncer leaves when it ends: figures in `syncer.json`, and the merged model.

The model is one that `from_pretrained` loads, with the tokenizer of its data beside it, or plain tensors
where it is a user's own.
"""

import logging
from pathlib import Path

import msgspec
import torch

from .. import config as configuration
from ..errors import DataError, ModelError
from ..protocol import messages as m
from ..protocol.syncer import SyncerMachine
from ..train import exported, models
from ..train.compute import FragmentState, OuterState
from ..train.options import DataOptions, ModelOptions

log = logging.getLogger("archipel")


def conclude(
    machine: SyncerMachine, outer: OuterState, states: list[FragmentState], *, out: Path, finish: m.Finish
) -> None:
    """Write what a finished syncer knows: digests, versions, the ledger; and the merged model.

    states: those of its last checkpoint: a merge that ended after it is no part of the run. They and the
    outer state are let go before the model is written, which takes three times the weights by itself.
    """
    facts = {
        "reason": finish.reason,
        "complete": finish.complete,
        "tick": machine.tick,
        "rounds": machine.rounds_merged,
        "versions": [state.version for state in states],
        "epoch": machine.epoch,
        "digest": outer.digest(states),
        "momentum_digest": outer.momentum_digest(states),
        "tokens": machine.ledger.table(),
        "ledger_closes": machine.ledger.closes(),
        "positions": machine.state().positions,
    }
    path = out / "syncer.json"
    path.with_suffix(".tmp").write_bytes(msgspec.json.format(msgspec.json.encode(facts), indent=1))
    path.with_suffix(".tmp").rename(path)
    tensors = {name: torch.from_numpy(array) for name, array in outer.tensors(states).items()}
    states.clear()
    outer.states.clear()
    settings = configuration.from_settings(machine.settings)
    export(tensors, settings.model, out / "model", data=settings.data)


def export(
    tensors: dict[str, torch.Tensor], options: ModelOptions, folder: Path, data: DataOptions | None = None
) -> None:
    """Write the merged model for `from_pretrained`; weights of a user's own model as plain tensors.

    data: what it learnt from. The tokenizer goes with the weights, if this host has it.
    """
    try:
        models.export(completed(tensors, options), options, folder)
    except ModelError as error:
        # Weights of a user's own model (--init): archipel cannot name its architecture.
        log.info("exported as plain tensors reason=%r", str(error))
        folder.mkdir(exist_ok=True)
        save_tensors(tensors, folder / "weights.safetensors")
        return
    if data is not None and options.kind != "vit":
        _export_tokenizer(data, options, folder)


def _export_tokenizer(data: DataOptions, options: ModelOptions, folder: Path) -> None:
    try:
        exported.write_tokenizer(data, options, folder)
    except (DataError, OSError) as error:
        log.warning("exported without a tokenizer, `archipel score` needs it named reason=%r", str(error))


def completed(tensors: dict[str, torch.Tensor], options: ModelOptions) -> dict[str, torch.Tensor]:
    """Return the merged tensors, and those that are not synchronised as the run's seed made them.

    ModelError if they are not of the model that the options describe.
    """
    if not options.vocabulary and options.kind != "vit":
        raise ModelError("model.vocabulary is unknown")
    model = models.build(options)
    try:
        found = model.load_state_dict(tensors, strict=False)
    except RuntimeError as error:
        raise ModelError(f"the tensors are of another model than [model] says: {error}") from None
    if found.unexpected_keys:
        raise ModelError(f"[model] has no tensor {found.unexpected_keys[0]!r}")
    local = [name for name in found.missing_keys if name in dict(model.named_parameters())]
    if local:
        log.warning("not synchronised, exported as they began tensors=%d first=%s", len(local), local[0])
    return dict(model.state_dict())


def save_tensors(
    tensors: dict[str, torch.Tensor], path: Path, metadata: dict[str, str] | None = None
) -> None:
    """Write tensors by name to a safetensors file, atomically."""
    from safetensors.torch import save_file

    temporary = path.with_suffix(".tmp")
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, temporary, metadata)
    temporary.rename(path)
