"""Do these tensors make up this model? Asked of names and shapes, before anything is copied.

Owns the answer for whoever brings weights: a checkpoint, or a trainer. Must not know where the
tensors are.
"""

from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn

from dovetail.errors import ConfigError
from dovetail.layers.shard import named_shards
from dovetail.weights.mapping import Piece, pieces_of

# Some old checkpoints hold what follows from the configuration.
_DERIVED = ".rotary_emb.inv_freq"


def match_pieces(
    model: nn.Module, shapes: Mapping[str, tuple[int, ...]], *, where: Callable[[str], str]
) -> dict[str, Piece]:
    """Return where each tensor goes, by its Hugging Face name.

    Args:
        model: as ``models.registry.build_model`` made it.
        shapes: of the tensors there are.
        where: says of a tensor, for messages, where it is or should be: "in FOLDER".

    Raises:
        ConfigError: a tensor is missing, left over, or of another shape than the model needs.
    """
    pieces: dict[str, Piece] = {}
    for name, parameter, shard in named_shards(model):
        pieces |= pieces_of(name, parameter, shard, shapes)

    missing = [name for name in pieces if name not in shapes]
    if missing:
        raise ConfigError(
            missing[0],
            f"is missing {where(missing[0])}; the model needs it with shape "
            f"{list(pieces[missing[0]].shape)}{_and_more(missing)}",
        )
    for name, piece in pieces.items():
        if shapes[name] != piece.shape:
            raise ConfigError(
                name,
                f"has shape {list(shapes[name])} {where(name)}; "
                f"the model needs {list(piece.shape)}",
            )
    tied = tied_names(model)
    unknown = [
        name
        for name in shapes
        if name not in pieces and name not in tied and not name.endswith(_DERIVED)
    ]
    if unknown:
        raise ConfigError(
            unknown[0],
            f"with shape {list(shapes[unknown[0]])} {where(unknown[0])} "
            f"has no place in the model{_and_more(unknown)}",
        )
    return pieces


def tied_names(model: nn.Module) -> dict[str, str]:
    """Return the further names of parameters that have several, with their first name."""
    first: dict[nn.Parameter, str] = {}
    tied: dict[str, str] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if first.setdefault(parameter, name) != name:
            tied[name] = first[parameter]
    return tied


def check_tied(name: str, tensor: Tensor, original: str, original_tensor: Tensor) -> None:
    """A tied tensor may be there a second time; raise ConfigError if it has other values."""
    if not torch.equal(tensor, original_tensor.to(tensor)):
        raise ConfigError(
            name,
            f"differs from {original}, though tie_word_embeddings is true; "
            "set it to false in config.json",
        )


def _and_more(names: list[str]) -> str:
    return f" (and {len(names) - 1} more)" if len(names) > 1 else ""
