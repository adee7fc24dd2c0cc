"""Load a checkpoint into a model.

Owns the order of things: everything is checked against the headers first, then copied. So a
checkpoint that does not fit leaves the parameters untouched.
"""

from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from torch import nn

from dovetail.dist.comm import Comm
from dovetail.errors import ConfigError
from dovetail.layers.shard import named_shards
from dovetail.weights.checkpoint import Checkpoint
from dovetail.weights.mapping import Piece, pieces_of

# Some old checkpoints hold what follows from the configuration.
_DERIVED = ".rotary_emb.inv_freq"


def load_weights(
    model: nn.Module,
    folder: str | Path,
    *,
    comm: Comm,
    on_progress: Callable[[int, int], None] | None = None,
) -> None:
    """Fill every parameter of a model from a Hugging Face folder.

    Data is converted to the parameters' dtype and copied into their memory; addresses stay.

    Args:
        model: as ``models.registry.build_model`` made it.
        folder: holds ``model.safetensors``, or shards and their index.
        comm: the ranks the model was built for; each takes its share.
        on_progress: called after each tensor with the number of tensors done and of all.

    Raises:
        ConfigError: the weights are missing, damaged, or not those of this model.
    """
    checkpoint = Checkpoint.open(folder)
    pieces = plan_load(model, checkpoint)
    for num_done, (name, tensor) in enumerate(checkpoint.read(pieces), start=1):
        pieces[name].fill(tensor, comm.rank, comm.size)
        if on_progress is not None:
            on_progress(num_done, len(pieces))


def check_weights(model: nn.Module, folder: str | Path) -> None:
    """Check that a folder has the weights of a model, which needs no memory of its own ("meta").

    Raises:
        ConfigError: as for ``load_weights``.
    """
    plan_load(model, Checkpoint.open(folder))


def plan_load(model: nn.Module, checkpoint: Checkpoint) -> Mapping[str, Piece]:
    """Return where each tensor of the checkpoint goes; nothing is copied.

    Raises:
        ConfigError: a tensor is missing, left over, or of another shape than the model needs.
    """
    stored = checkpoint.stored
    pieces: dict[str, Piece] = {}
    for name, parameter, shard in named_shards(model):
        pieces |= pieces_of(name, parameter, shard, stored)

    missing = [name for name in pieces if name not in stored]
    if missing:
        raise ConfigError(
            missing[0],
            f"is missing in {checkpoint.folder}; the model needs it with shape "
            f"{list(pieces[missing[0]].shape)}{_and_more(missing)}",
        )
    for name, piece in pieces.items():
        if stored[name].shape != piece.shape:
            raise ConfigError(
                name,
                f"has shape {list(stored[name].shape)} in {stored[name].file}; "
                f"the model needs {list(piece.shape)}",
            )
    tied = _tied_names(model)
    unknown = [
        name
        for name in stored
        if name not in pieces and name not in tied and not name.endswith(_DERIVED)
    ]
    if unknown:
        raise ConfigError(
            unknown[0],
            f"with shape {list(stored[unknown[0]].shape)} in {stored[unknown[0]].file} "
            f"has no place in the model{_and_more(unknown)}",
        )
    for name, original in tied.items():
        _check_tied(checkpoint, name, original)
    return pieces


def _tied_names(model: nn.Module) -> dict[str, str]:
    """Return the further names of parameters that have several, with their first name."""
    first: dict[nn.Parameter, str] = {}
    tied: dict[str, str] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if first.setdefault(parameter, name) != name:
            tied[name] = first[parameter]
    return tied


def _check_tied(checkpoint: Checkpoint, name: str, original: str) -> None:
    """A tied tensor may be stored a second time, but not with other values."""
    if name not in checkpoint.stored:
        return
    tensors = dict(checkpoint.read([name, original]))
    if not torch.equal(tensors[name], tensors[original].to(tensors[name].dtype)):
        raise ConfigError(
            name,
            f"differs from {original}, though tie_word_embeddings is true; "
            "set it to false in config.json",
        )


def _and_more(names: list[str]) -> str:
    return f" (and {len(names) - 1} more)" if len(names) > 1 else ""
