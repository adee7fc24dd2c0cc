"""New weights for a model that serves, from the tensors of a trainer.

Owns a copy beside the old weights. It is checked whole before the model is touched, so what does
not fit, or is not finite, leaves the old weights as they are. Must not know when a model may be
written.
"""

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from dovetail.dist.comm import Comm
from dovetail.errors import ConfigError, RequestError
from dovetail.weights.manifest import check_tied, match_pieces, tied_names
from dovetail.weights.mapping import Piece

NamedTensors = Mapping[str, Tensor] | Iterable[tuple[str, Tensor]]
"""Weights by their Hugging Face names, such as ``model.named_parameters()`` gives them."""

_PAIRS = "give pairs of a name and a tensor, such as model.named_parameters() has"
_DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


class StagedWeights:
    """Whole new weights of a model, beside those that it has.

    Invariant: every element is finite and has come from ``named_tensors``, of which nothing is
    kept. Takes as much memory as the model's parameters until it is dropped.
    """

    def __init__(self, model: nn.Module, named_tensors: NamedTensors, *, comm: Comm) -> None:
        """Check and copy; the model is not touched.

        Args:
            model: as ``models.registry.build_model`` made it.
            named_tensors: any float dtype, on any device; converted to the parameters' dtype.
            comm: the ranks the model was built for; each takes its share.

        Raises:
            RequestError: a tensor is missing, left over, given twice, of another shape, of a kind
                that cannot be copied, or not finite, and is named; these are no pairs of a name
                and a tensor; or there is no room.
        """
        tensors = _by_name(named_tensors)
        try:
            pieces = match_pieces(
                model,
                {name: tuple(tensor.shape) for name, tensor in tensors.items()},
                where=lambda _: "among the new weights",
            )
            for name, original in tied_names(model).items():
                if name in tensors:
                    check_tied(name, tensors[name], original, tensors[original])
        except ConfigError as error:
            hint = "" if error.field in tensors else _given(error.field, tensors)
            raise RequestError(error.field, error.message + hint) from None
        self._staged = _beside(model)
        for name, piece in pieces.items():
            self._stage(name, piece, tensors[name], comm)
        for device in {parameter.device for parameter in self._staged}:
            if device.type == "cuda":  # who installs does so from another stream
                torch.cuda.synchronize(device)

    def _stage(self, name: str, piece: Piece, tensor: Tensor, comm: Comm) -> None:
        staged = replace(piece, parameter=self._staged[piece.parameter])
        staged.fill(tensor, comm.rank, comm.size)
        region = staged.parameter[staged.region]
        if not torch.isfinite(region).all():
            raise RequestError(
                name,
                f"is not finite in {_name(region.dtype)}; look for what went wrong in the "
                "trainer, the old weights are served on",
            )

    @torch.no_grad()
    def install(self) -> None:
        """Write the new weights over the old ones, at the same addresses."""
        for parameter, staged in self._staged.items():
            parameter.copy_(staged)


def _beside(model: nn.Module) -> dict[nn.Parameter, nn.Parameter]:
    """Return memory for each parameter of the model once more."""
    parameters = list(model.parameters())
    try:
        return {p: nn.Parameter(torch.empty_like(p), requires_grad=False) for p in parameters}
    except torch.OutOfMemoryError:
        num_bytes = sum(p.numel() * p.element_size() for p in parameters)
        raise RequestError(
            "named_tensors",
            f"are copied beside the old weights, and there is no room for {num_bytes:,} bytes; "
            "start the engine with a smaller KV pool (--memory-fraction or --kv-memory)",
        ) from None


def _by_name(named_tensors: NamedTensors) -> dict[str, Tensor]:
    pairs: Any = named_tensors.items() if isinstance(named_tensors, Mapping) else named_tensors
    if not isinstance(pairs, Iterable):
        raise RequestError("named_tensors", f"is a {type(pairs).__name__}; {_PAIRS}")
    tensors: dict[str, Tensor] = {}
    for number, pair in enumerate(pairs):
        if not (isinstance(pair, tuple | list) and len(pair) == 2 and isinstance(pair[0], str)):
            what = type(pair).__name__
            raise RequestError("named_tensors", f"has a {what} at place {number}; {_PAIRS}")
        name, tensor = pair
        if name in tensors:
            raise RequestError(name, "is given twice; which one is meant?")
        _check_kind(name, tensor)
        tensors[name] = tensor.detach()
    return tensors


def _given(name: str, tensors: Mapping[str, Tensor]) -> str:
    """Return what there is where a name is missing: the same one under a wrapper's, or any."""
    if not tensors:
        return "; none are given"
    wrapped = next((given for given in tensors if given.endswith(f".{name}")), None)
    if wrapped is None:
        return f"; given are {len(tensors)}, the first is {next(iter(tensors))!r}"
    return (
        f"; given is {wrapped!r}: take {wrapped.removesuffix(name)!r} off the names, or give those "
        "of the module inside its wrapper"
    )


def _check_kind(name: str, tensor: object) -> None:
    """Raise RequestError if this is nothing to copy plain numbers from."""
    if not isinstance(tensor, Tensor):
        raise RequestError(name, f"is a {type(tensor).__name__}; give torch tensors")
    if hasattr(tensor, "full_tensor"):
        raise RequestError(name, "is a share of a DTensor; give what its full_tensor() returns")
    if tensor.is_meta or tensor.layout != torch.strided:
        raise RequestError(
            name, f"has no plain data ({tensor.layout}, {tensor.device}); give a dense tensor"
        )
    if tensor.dtype not in _DTYPES:
        raise RequestError(
            name,
            f"is {_name(tensor.dtype)}; give {', '.join(map(_name, _DTYPES))} "
            "(quantised weights are not supported)",
        )


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
