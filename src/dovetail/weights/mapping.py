"""Which tensors of a checkpoint make up which parameters.

Owns the names and layouts of Hugging Face checkpoints. Our parameters have the same names except
where several tensors are fused into one parameter, so the mapping goes by the parameter's name and
serves every family. Must not know files.
"""

from collections.abc import Callable, Container, Mapping
from dataclasses import dataclass

from torch import Tensor, nn

from dovetail.layers.shard import Shard

# Parameter names hold the key, tensor names one of the values, in the order of the shard's parts.
_FUSED = {
    ".qkv_proj.": (".q_proj.", ".k_proj.", ".v_proj."),
    ".gate_up_proj.": (".gate_proj.", ".up_proj."),
}

# The parameters of experts: the projections of one expert, and the name of the tensor in which some
# checkpoints hold those of all experts, laid out as our parameter.
_EXPERTS = {
    ".experts.w_gate_up": (("gate_proj", "up_proj"), ".experts.gate_up_proj"),
    ".experts.w_down": (("down_proj",), ".experts.down_proj"),
}


Copy = Callable[[Tensor, Tensor], None]
"""Copies into a place within a parameter, given first, what belongs there, from the host's memory;
converts the dtype."""


def copy_at_once(target: Tensor, source: Tensor) -> None:
    """Copy; done when it returns. A ``Copy``."""
    target.copy_(source)


@dataclass(frozen=True, slots=True)
class Piece:
    """The place of one checkpoint tensor: a region of a rank's parameter.

    Attributes:
        parameter: the parameter, this rank's share.
        region: index of the region within it; the regions of a parameter's pieces tile it.
        shape: shape of the checkpoint tensor.
        shard: which share of the checkpoint tensor goes there.
    """

    parameter: nn.Parameter
    region: tuple[int | slice, ...]
    shape: tuple[int, ...]
    shard: Shard

    def fill(self, tensor: Tensor, rank: int, size: int, copy: Copy = copy_at_once) -> None:
        """Copy this rank's share into the parameter's memory, converting the dtype."""
        copy(self.parameter.data[self.region], self.shard.take(tensor, rank, size))


def pieces_of(
    name: str, parameter: nn.Parameter, shard: Shard, stored: Container[str]
) -> Mapping[str, Piece]:
    """Return the pieces that make up a parameter, by name of the checkpoint tensor.

    Args:
        name: full name of the parameter.
        parameter: this rank's share of it.
        shard: its shard rule.
        stored: names in the checkpoint; where a parameter can be stored in two ways, they decide.
    """
    for suffix, (projections, together) in _EXPERTS.items():
        if not name.endswith(suffix):
            continue
        mlp = name.removesuffix(suffix)
        if mlp + together in stored:
            return {mlp + together: _whole(parameter, shard)}
        pieces: dict[str, Piece] = {}
        for expert in range(parameter.shape[0]):
            names = [f"{mlp}.experts.{expert}.{projection}.weight" for projection in projections]
            pieces |= _parts(names, parameter, shard, at=(expert,))
        return pieces
    for infix, replacements in _FUSED.items():
        if infix in name:
            names = [name.replace(infix, replacement) for replacement in replacements]
            return _parts(names, parameter, shard, at=())
    return {name: _whole(parameter, shard)}


def _whole(parameter: nn.Parameter, shard: Shard) -> Piece:
    return Piece(parameter, (), shard.whole_shape(tuple(parameter.shape)), shard)


def _parts(
    names: list[str], parameter: nn.Parameter, shard: Shard, *, at: tuple[int, ...]
) -> dict[str, Piece]:
    """One tensor for each part of the shard rule, all at index ``at`` of the leading dimensions."""
    assert shard.dim is not None
    local = parameter.shape[len(at) :]
    dim = shard.dim - len(at)
    num_ranks = sum(shard.parts) // local[dim]
    pieces: dict[str, Piece] = {}
    start = 0
    for name, part in zip(names, shard.parts, strict=True):
        end = start + part // num_ranks
        region = (*at, *[slice(None)] * dim, slice(start, end))
        shape = (*local[:dim], part, *local[dim + 1 :])
        pieces[name] = Piece(parameter, region, shape, Shard(dim=dim, parts=(part,)))
        start = end
    return pieces
