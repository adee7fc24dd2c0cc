"""Load a checkpoint into a model.

Owns the order of things: everything is checked against the headers first, then copied. So a
checkpoint that does not fit leaves the parameters untouched.
"""

from collections.abc import Callable, Mapping
from pathlib import Path

from torch import nn

from dovetail.dist.comm import Comm
from dovetail.weights.checkpoint import Checkpoint
from dovetail.weights.manifest import check_tied, match_pieces, tied_names
from dovetail.weights.mapping import Copy, Piece, copy_at_once


def load_weights(
    model: nn.Module,
    folder: str | Path,
    *,
    comm: Comm,
    on_progress: Callable[[int, int], None] | None = None,
    copy: Copy = copy_at_once,
) -> None:
    """Fill every parameter of a model from a Hugging Face folder.

    Data is converted to the parameters' dtype and copied into their memory; addresses stay.

    Args:
        model: as ``models.registry.build_model`` made it.
        folder: holds ``model.safetensors``, or shards and their index.
        comm: the ranks the model was built for; each takes its share.
        on_progress: called after each tensor with the number of tensors done and of all.
        copy: how data gets into the parameters' memory.

    Raises:
        ConfigError: the weights are missing, damaged, or not those of this model.
    """
    checkpoint = Checkpoint.open(folder)
    pieces = plan_load(model, checkpoint)
    for num_done, (name, tensor) in enumerate(checkpoint.read(pieces), start=1):
        pieces[name].fill(tensor, comm.rank, comm.size, copy)
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
        ConfigError: see ``match_pieces``; or a tied tensor is there twice, with two values.
    """
    stored = checkpoint.stored

    def where(name: str) -> str:
        return f"in {stored[name].file if name in stored else checkpoint.folder}"

    shapes = {name: tensor.shape for name, tensor in stored.items()}
    pieces = match_pieces(model, shapes, where=where)
    for name, original in tied_names(model).items():
        if name in shapes:
            tensors = dict(checkpoint.read([name, original]))
            check_tied(name, tensors[name], original, tensors[original])
    return pieces
