# pyright: strict
"""From traces of sequences to the routes of a micro-batch, by an index of tokens.

Owns ``TokenTable``, all tokens of a batch one after another with their rows, and ``RouteBatch``,
the rows in the order of a micro-batch. A trainer has its own ways to pad, pack and slice, and
each of them would have to be done again for routes, and right. Instead the *index* of the tokens
goes through the trainer's code as if it were ``input_ids``, with -1 at pads, and whatever comes
out says which row belongs where.

Shape legend: N tokens of a micro-batch, in the order of its flattened index; L MoE layers,
K experts of a token; T tokens of the table.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Literal, cast, get_args

import numpy as np
import torch
from torch import Tensor

from dovetail.replay.errors import ReplayError, kind_of
from dovetail.replay.records import RouteTrace, TraceError

MAX_EXPERTS = 1 << 15
Missing = Literal["error", "live"]


def route_dtype(num_experts: int) -> torch.dtype:
    """Return the dtype of ids on a device: uint8 up to 256 experts, else int16."""
    if num_experts > MAX_EXPERTS:
        raise ReplayError(f"{num_experts} experts; ids are at most 16 bits wide")
    return torch.uint8 if num_experts <= 256 else torch.int16


@dataclass(frozen=True, slots=True, eq=False)
class RouteBatch:
    """The experts of the tokens of one micro-batch.

    Attributes:
        ids_NLK: see ``route_dtype``; logical ids in the order of combination. Rows where
            ``has_row_N`` is False are not read.
        has_row_N: bool. Tokens without a row (pads, last tokens of sequences) are routed live:
            nothing that counts depends on them.
        layer_ids: decoder index of each of the L layers.
        num_experts: routed experts of a layer.
        num_missing: tokens that something depends on and that have no row; 0 but where
            ``TokenTable.routes`` was told to let them be.

    Raises:
        ReplayError: the fields do not fit each other, or an id on the CPU is none.
    """

    ids_NLK: Tensor
    has_row_N: Tensor
    layer_ids: tuple[int, ...]
    num_experts: int
    num_missing: int = 0

    def __post_init__(self) -> None:
        ids, has_row = self.ids_NLK, self.has_row_N
        want = route_dtype(self.num_experts)
        _expect(ids.ndim == 3, f"ids have {ids.ndim} axes; give [tokens, layers, experts]")
        _expect(ids.dtype == want, f"ids are {ids.dtype}; {self.num_experts} experts need {want}")
        _expect(
            has_row.shape == ids.shape[:1] and has_row.dtype == torch.bool,
            f"has_row is {has_row.dtype} {tuple(has_row.shape)}; give bool [{len(ids)}]",
        )
        _expect(
            len(self.layer_ids) == ids.shape[1],
            f"ids have {ids.shape[1]} layers, layer_ids names {len(self.layer_ids)}",
        )
        if ids.device.type == "cpu" and bool(has_row.any()):
            low, high = ids[has_row].aminmax()
            _expect(
                int(low) >= 0 and int(high) < self.num_experts,
                f"ids go from {int(low)} to {int(high)}; there are {self.num_experts} experts",
            )

    @property
    def num_tokens(self) -> int:
        """Tokens of the micro-batch, pads included (N)."""
        return self.ids_NLK.shape[0]

    @property
    def num_experts_per_tok(self) -> int:
        """Experts of a token in a layer (K)."""
        return self.ids_NLK.shape[2]

    def to(self, device: torch.device | str) -> "RouteBatch":
        """Return the same on another device."""
        return replace(self, ids_NLK=self.ids_NLK.to(device), has_row_N=self.has_row_N.to(device))


def expect_batch(routes: object) -> None:
    """Raise ReplayError unless these are the routes of a micro-batch."""
    if not isinstance(routes, RouteBatch):
        raise ReplayError(
            f"routes is {kind_of(routes)}; give the RouteBatch that TokenTable.routes(index) makes"
        )


class TokenTable:
    """All tokens of a batch of sequences, one after another, and the rows of their traces.

    Owns the numbering: token t of sequence s has the number ``begins[s] + t``. Is not changed
    after it is made. docs/replay.md has examples.

    Args:
        sequences: token ids of each, prompt and response together.
        traces: of each sequence; None where routes are not asked for.

    Attributes:
        tokens_T: int64, the ids of all tokens.
        sequence_T: int64, the number of each token's sequence.
        begins: where each sequence begins, and the end of the last.

    Raises:
        TraceError: a trace is not of its sequence, or not of the same model as the others.
        ReplayError: there are not as many as sequences, or one is none.
    """

    def __init__(
        self, sequences: Sequence[Sequence[int]], traces: Sequence[RouteTrace] | None = None
    ) -> None:
        for number, sequence in enumerate(sequences):
            _expect(not isinstance(sequence, str), f"sequence {number} is text; give its token ids")
        lengths = [len(sequence) for sequence in sequences]
        self.begins: list[int] = np.concatenate([[0], np.cumsum(lengths)]).astype(int).tolist()
        flat = [token for sequence in sequences for token in sequence]
        self.tokens_T = torch.tensor(flat, dtype=torch.int64)
        self.sequence_T = torch.repeat_interleave(torch.tensor(lengths, dtype=torch.int64))
        self._traces = None if traces is None else tuple(traces)
        self._rows: Tensor | None = None
        self._has_row = torch.zeros(len(flat), dtype=torch.bool)
        if self._traces:
            _validate(sequences, self._traces)
            self._rows = self._fill(self._traces)

    def _fill(self, traces: Sequence[RouteTrace]) -> Tensor:
        first = traces[0]
        _, layers, k = first.ids.shape
        rows = torch.zeros((len(self.tokens_T), layers, k), dtype=route_dtype(first.num_experts))
        dtype = np.uint8 if rows.dtype == torch.uint8 else np.int16
        for begin, trace in zip(self.begins, traces, strict=False):
            at = slice(begin + trace.start, begin + trace.end)
            rows[at] = torch.as_tensor(trace.ids.astype(dtype))
            self._has_row[at] = True
        return rows

    def __len__(self) -> int:
        """Return the number of sequences."""
        return len(self.begins) - 1

    # -- the index -----------------------------------------------------------------------

    def indices(self, numbers: Iterable[int] | None = None) -> list[Tensor]:
        """Return the index of some sequences, int64 [tokens] each; None is all of them.

        Give these to the code that batches ``input_ids``, with -1 where that has a pad.
        """
        chosen = range(len(self)) if numbers is None else numbers
        return [torch.arange(self.begins[s], self.begins[s + 1]) for s in chosen]

    def next(self, index: Tensor) -> Tensor:
        """Return the index of each token's follower in its sequence; -1 if there is none.

        So ``table.tokens(table.next(index))`` are the targets of ``table.tokens(index)``, whatever
        the layout is.

        Raises:
            ReplayError: the index is not of these tokens.
        """
        index = self._checked(index).cpu()
        ends = torch.tensor(self.begins[1:], dtype=torch.int64)
        is_last = index + 1 == _at(ends[self.sequence_T], index)
        return torch.where((index < 0) | is_last, -1, index + 1)

    # -- columns, in the order of an index -------------------------------------------------

    def tokens(self, index: Tensor, *, fill: int = 0) -> Tensor:
        """Return the token ids at ``index``, int64 of its shape; ``fill`` at pads."""
        return self.column(self.tokens_T, index, fill=fill)

    def column(
        self, values: Tensor | Sequence[Tensor], index: Tensor, *, fill: float = 0
    ) -> Tensor:
        """Return any per-token values at ``index``: logprobs, advantages, loss masks.

        Args:
            values: [T, ...], or a tensor for each sequence, with one value a token.
            index: int64, any shape.
            fill: at pads.

        Raises:
            ReplayError: there are not as many values as tokens, in all or of a sequence, they are
                no tensors, or the index is not of these tokens.
        """
        flat = values if isinstance(values, Tensor) else self._joined(values)
        _expect(
            len(flat) == len(self.tokens_T),
            f"{len(flat)} values for {len(self.tokens_T)} tokens; give one a token",
        )
        index = self._checked(index).to(flat.device)
        out = _at(flat, index)
        is_pad = (index < 0).reshape(index.shape + (1,) * (out.ndim - index.ndim))
        return out.masked_fill(is_pad, fill)

    def _joined(self, values: Sequence[object]) -> Tensor:
        """Return the values of all sequences, after a look that each has its own number of them."""
        _expect(len(values) == len(self), f"values of {len(values)} sequences, not of {len(self)}")
        parts: list[Tensor] = []
        for number, part in enumerate(values):
            if not isinstance(part, Tensor):
                raise ReplayError(
                    f"the values of sequence {number} are {kind_of(part)}; give torch.tensor(...) "
                    "of it"
                )
            num_tokens = self.begins[number + 1] - self.begins[number]
            _expect(
                part.ndim > 0 and len(part) == num_tokens,
                f"the values of sequence {number} have shape {list(part.shape)}, but it has "
                f"{num_tokens} tokens: give one a token, in the order of the sequences",
            )
            parts.append(part)
        return torch.cat(parts)

    def routes(
        self,
        index: Tensor,
        *,
        input_ids: Tensor | None = None,
        missing: Missing = "error",
    ) -> RouteBatch:
        """Return the rows at ``index``, flattened in C order as models flatten their batch.

        Args:
            index: int64, of the shape of ``input_ids``; -1 at pads. For a model that flattens
                sequence-major give the transposed one.
            input_ids: of the micro-batch, to be compared; None is not compared.
            missing: what becomes of a token that others depend on and that has no row.
                ``"live"`` lets the model choose; ``RouteBatch.num_missing`` counts them.

        Raises:
            ReplayError: there are no traces, the index is not of these tokens, a row is missing, or
                ``missing`` is neither word.
        """
        _expect(missing in get_args(Missing), f'missing is {missing!r}; give "error" or "live"')
        if self._rows is None or self._traces is None:
            raise ReplayError("the table has no traces; give them where it is made")
        flat = self._checked(index).cpu().reshape(-1)
        is_pad = flat < 0
        if input_ids is not None:
            self._compare(flat, input_ids)
        has_row = _at(self._has_row, flat) & ~is_pad
        is_missing = ~has_row & ~is_pad & (self.next(flat) >= 0)
        if missing == "error" and bool(is_missing.any()):
            token = int(flat[is_missing][0])
            number = int(self.sequence_T[token])
            raise ReplayError(
                f"{int(is_missing.sum())} tokens have no row, the first at position "
                f"{token - self.begins[number]} of sequence {number}, whose trace has "
                f"[{self._traces[number].start}, {self._traces[number].end}): join the traces of "
                "earlier turns with RouteTrace.concat, leave out a generation that was aborted in "
                'its prompt, or say missing="live"'
            )
        first = self._traces[0]
        return RouteBatch(
            _at(self._rows, flat),
            has_row,
            first.layer_ids,
            first.num_experts,
            int(is_missing.sum()),
        )

    def traces(self, routes: RouteBatch, index: Tensor) -> list[RouteTrace]:
        """Return the trace of each sequence, of rows that a trainer recorded at ``index``.

        The last token of a sequence was no input of a prediction and gets no row.

        Raises:
            ReplayError: the index does not have each token of the table once, or is not of them.
        """
        flat = self._checked(index).cpu().reshape(-1)
        _expect(routes.num_tokens == len(flat), f"{routes.num_tokens} rows, {len(flat)} tokens")
        order = torch.full((len(self.tokens_T),), -1)
        order[flat[flat >= 0]] = torch.nonzero(flat >= 0).view(-1)
        is_whole = int((flat >= 0).sum()) == len(self.tokens_T) and bool((order >= 0).all())
        _expect(is_whole, "the index does not have each token once")
        rows = routes.ids_NLK.cpu()[order].numpy()
        tokens = cast(list[int], self.tokens_T.tolist())  # pyright: ignore[reportUnknownMemberType]
        return [
            RouteTrace.of_tokens(
                rows[begin : max(end - 1, begin)],
                tokens[begin:end],
                layer_ids=routes.layer_ids,
                num_experts=routes.num_experts,
            )
            for begin, end in pairwise(self.begins)
        ]

    def _checked(self, index: object) -> Tensor:
        """Return the index; raise ReplayError if it is not of these tokens."""
        if not isinstance(index, Tensor):
            raise ReplayError(f"index is {kind_of(index)}; give an int64 tensor, as of indices()")
        _expect(
            not index.is_floating_point() and index.dtype != torch.bool,
            f"index is {index.dtype}; give the int64 numbers of indices()",
        )
        _expect(
            bool(((index >= -1) & (index < len(self.tokens_T))).all()),
            f"the index is not one of these {len(self.tokens_T)} tokens",
        )
        return index

    def _compare(self, flat: Tensor, input_ids: object) -> None:
        if not isinstance(input_ids, Tensor):
            raise ReplayError(f"input_ids is {kind_of(input_ids)}; give the model's int64 tensor")
        input_ids = input_ids.cpu().reshape(-1)
        _expect(len(input_ids) == len(flat), f"{len(input_ids)} input_ids, an index of {len(flat)}")
        differs = (flat >= 0) & (_at(self.tokens_T, flat) != input_ids)
        if bool(differs.any()):
            at = int(torch.nonzero(differs)[0])
            raise ReplayError(
                f"place {at} of input_ids is token {int(input_ids[at])}, the index says "
                f"{int(self.tokens_T[flat[at]])}: send the index through the same code as the ids"
            )


def _at(values: Tensor, index: Tensor) -> Tensor:
    """Return the values at an index, and anything at pads; a batch may have nothing else."""
    if not len(values) and bool((index < 0).all()):
        return values.new_zeros((*index.shape, *values.shape[1:]))
    return values[index.clamp(min=0)]


def _validate(sequences: Sequence[Sequence[int]], traces: Sequence[RouteTrace]) -> None:
    _expect(len(traces) == len(sequences), f"{len(traces)} traces for {len(sequences)} sequences")
    for number, trace in enumerate(traces):
        _expect_trace(trace, number)
    first = traces[0]
    for number, (sequence, trace) in enumerate(zip(sequences, traces, strict=True)):
        try:
            trace.validate(
                sequence,
                layer_ids=first.layer_ids,
                num_experts=first.num_experts,
                num_experts_per_tok=first.num_experts_per_tok,
            )
        except TraceError as error:
            raise TraceError(f"sequence {number}: {error}") from None


def _expect_trace(trace: object, number: int) -> None:
    if not isinstance(trace, RouteTrace):
        raise ReplayError(
            f"the trace of sequence {number} is {kind_of(trace)}; Generation.routes is one where "
            'generate was told capture=("experts",)'
        )


def _expect(condition: bool, message: str) -> None:
    if not condition:
        raise ReplayError(message)
