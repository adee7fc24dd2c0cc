# pyright: strict
"""The experts that each token of a sequence went through, as a trainer takes them over.

Owns ``RouteTrace``: its rules, how it is cut and joined, its bytes, and the layouts of other
engines. Must not know any trainer, nor an engine; needs numpy and msgspec only. What a trace is
for: Rollout Routing Replay (arXiv 2510.11370).

Shape legend: T rows (one a token that was an input), L MoE layers, K experts of a token.
"""

import base64
import hashlib
import math
import struct
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, cast

import msgspec
import numpy as np
from numpy.typing import NDArray

from dovetail.replay.errors import kind_of
from dovetail.wire.capture import CaptureSpan, expert_dtype

MAGIC = b"dovetail.routes\x01"
_LENGTH = struct.Struct("<Q")
DIGEST_BYTES = 16
MAX_LENGTH = 2**31 - 1

Ids = NDArray[np.unsignedinteger[Any]]


class TraceError(ValueError):
    """A trace that does not hold together, or does not belong to these tokens or this model."""


class RouteHeader(msgspec.Struct, frozen=True, kw_only=True):
    """What is told of a trace beside its raw ids; see ``RouteTrace``.

    Attributes:
        shape: [rows, MoE layers, experts of a token].
        dtype: ``uint8`` or ``uint16``, little-endian, C order.
        token_digest: hexadecimal.
    """

    shape: tuple[int, int, int]
    dtype: str
    start: int
    layer_ids: tuple[int, ...]
    num_experts: int
    spans: tuple[CaptureSpan, ...]
    token_digest: str


def digest_of(token_ids: Iterable[int]) -> bytes:
    """Return blake2b of the ids as little-endian int32, 16 bytes."""
    ids = tuple(token_ids)
    packed = struct.pack(f"<{len(ids)}i", *ids)
    return hashlib.blake2b(packed, digest_size=DIGEST_BYTES).digest()


@dataclass(frozen=True, slots=True, eq=False)
class RouteTrace:
    """The experts of the tokens at positions ``[start, end)`` of one sequence.

    Attributes:
        ids: uint8 or uint16 [T, L, K], logical expert ids in the router's own order, which is the
            order of combination. Row t belongs to position ``start + t`` and says what was used
            when that token was the input; so the last token of a generation has no row.
        layer_ids: decoder index of each of the L layers; dense layers have no rows.
        num_experts: routed experts of a layer.
        start: position of the first row.
        spans: where the rows come from, without gaps; see ``CaptureSpan``.
        token_digest: of the tokens at ``[start, end)``; see ``digest_of``.

    Raises:
        TraceError: shape, dtype, layers and spans do not fit each other.
    """

    ids: Ids
    layer_ids: tuple[int, ...]
    num_experts: int
    start: int
    spans: tuple[CaptureSpan, ...]
    token_digest: bytes

    def __post_init__(self) -> None:
        problem = self._problem()
        if problem is not None:
            raise TraceError(problem)

    def _problem(self) -> str | None:
        """Return what does not fit, or None; traces come by the thousand, so no text before."""
        ids, layer_ids = self.ids, self.layer_ids
        if ids.ndim != 3:
            return f"ids have {ids.ndim} axes; give [rows, layers, experts of a token]"
        if self.num_experts <= 0:
            return f"num_experts is {self.num_experts}"
        if ids.dtype != (want := expert_dtype(self.num_experts)):
            return f"ids are {ids.dtype}; {self.num_experts} experts need {want}"
        if not ids.flags.c_contiguous:
            return "ids are not in C order"
        if len(layer_ids) != ids.shape[1]:
            return f"ids have {ids.shape[1]} layers, layer_ids names {len(layer_ids)}"
        if list(layer_ids) != sorted(set(layer_ids)):
            return f"layer_ids {layer_ids} do not ascend"
        if self.start < 0:
            return f"start is {self.start}"
        if len(self.token_digest) != DIGEST_BYTES:
            return "token_digest has another length than 16"
        borders = [self.start, *(span.end for span in self.spans)]
        begins = [*(span.start for span in self.spans), self.end]
        if borders != begins or not all(a < b for a, b in pairwise(borders)):
            return f"spans do not cover positions {self.start} to {self.end}: {self.spans}"
        return None

    @classmethod
    def of_tokens(
        cls,
        ids: NDArray[Any],
        token_ids: Sequence[int],
        *,
        layer_ids: Sequence[int],
        num_experts: int,
        start: int = 0,
        spans: tuple[CaptureSpan, ...] | None = None,
        epoch: int = 0,
    ) -> "RouteTrace":
        """Make a trace of rows and the tokens of their sequence.

        Args:
            ids: any integers [T, L, K].
            token_ids: the whole sequence from position 0, at least up to the last row.
            layer_ids, num_experts, start: see the class.
            spans: None is one span of ``epoch``.
            epoch: of the only span.

        Raises:
            TraceError: as the class, or an id is none, or there are fewer tokens than rows.
        """
        end = start + len(ids)
        _expect(end <= len(token_ids), f"rows up to position {end}, but {len(token_ids)} tokens")
        _check_range(ids, num_experts, start)
        if spans is None:
            spans = (CaptureSpan(start=start, end=end, epoch=epoch),) if len(ids) else ()
        return cls(
            np.ascontiguousarray(ids, dtype=expert_dtype(num_experts)),
            tuple(layer_ids),
            num_experts,
            start,
            spans,
            digest_of(token_ids[start:end]),
        )

    # -- asking --------------------------------------------------------------------------

    @property
    def num_rows(self) -> int:
        """Tokens with a row (T)."""
        return self.ids.shape[0]

    @property
    def end(self) -> int:
        """Position after the last row."""
        return self.start + self.num_rows

    @property
    def num_experts_per_tok(self) -> int:
        """Experts of a token in a layer (K)."""
        return self.ids.shape[2]

    @property
    def header(self) -> RouteHeader:
        """What is told beside the raw ids."""
        rows, layers, k = self.ids.shape
        return RouteHeader(
            shape=(rows, layers, k),
            dtype=self.ids.dtype.name,
            start=self.start,
            layer_ids=self.layer_ids,
            num_experts=self.num_experts,
            spans=self.spans,
            token_digest=self.token_digest.hex(),
        )

    def validate(
        self,
        token_ids: Sequence[int],
        *,
        layer_ids: Sequence[int] | None = None,
        num_experts: int | None = None,
        num_experts_per_tok: int | None = None,
    ) -> None:
        """Raise TraceError unless the trace is of these tokens and this model.

        Args:
            token_ids: the whole sequence from position 0.
            layer_ids, num_experts, num_experts_per_tok: of the model; None is not compared.
        """
        _expect(self.end <= len(token_ids), f"{len(token_ids)} tokens; the rows end at {self.end}")
        _expect(
            digest_of(token_ids[self.start : self.end]) == self.token_digest,
            f"the tokens at [{self.start}, {self.end}) are not those of the trace",
        )
        _expect(
            layer_ids is None or tuple(layer_ids) == self.layer_ids,
            f"the model's MoE layers are {layer_ids}, the trace's {self.layer_ids}",
        )
        for name, mine, theirs in (
            ("num_experts", self.num_experts, num_experts),
            ("num_experts_per_tok", self.num_experts_per_tok, num_experts_per_tok),
        ):
            _expect(theirs in (None, mine), f"{name} is {theirs}, the trace's {mine}")
        _check_range(self.ids, self.num_experts, self.start)
        ordered = np.sort(self.ids, axis=-1)
        _expect_rows(
            (ordered[..., 1:] == ordered[..., :-1]).any(-1), self.start, "twice one expert"
        )

    # -- cutting and joining -------------------------------------------------------------

    def slice_tokens(self, begin: int, end: int, token_ids: Sequence[int]) -> "RouteTrace":
        """Return the rows of absolute positions ``[begin, end)``; ``token_ids`` from position 0.

        Spans are cut with them. A span's ``num_differing`` cannot be divided: a part keeps it as
        an upper bound, at most its own length.
        """
        _expect(
            self.start <= begin <= end <= self.end,
            f"[{begin}, {end}) is not within the rows [{self.start}, {self.end})",
        )
        self.validate(token_ids)
        spans = (_cut(span, begin, end) for span in self.spans)
        return RouteTrace(
            self.ids[begin - self.start : end - self.start].copy(),
            self.layer_ids,
            self.num_experts,
            begin,
            tuple(span for span in spans if span.start < span.end),
            digest_of(token_ids[begin:end]),
        )

    def delta(self, known_len: int, token_ids: Sequence[int]) -> "RouteTrace":
        """Return the rows of a further turn: those from position ``known_len - 1`` on.

        ``known_len`` is the length of the sequence after the turn before. Its last token was
        sampled there and became an input only now, so its row belongs to this turn.
        """
        return self.slice_tokens(max(known_len - 1, self.start), self.end, token_ids)

    @staticmethod
    def concat(parts: Sequence["RouteTrace"], token_ids: Sequence[int]) -> "RouteTrace":
        """Join the traces of consecutive turns; ``token_ids`` is the sequence from position 0.

        Raises:
            TraceError: there is a gap or an overlap, a part is of other tokens, or of another
                model.
        """
        _expect(len(parts) > 0, "there are no parts")
        first = parts[0]
        for before, after in pairwise(parts):
            _expect(
                before.end == after.start,
                f"a part ends at {before.end}, the next begins at {after.start}",
            )
        for part in parts:
            part.validate(
                token_ids,
                layer_ids=first.layer_ids,
                num_experts=first.num_experts,
                num_experts_per_tok=first.num_experts_per_tok,
            )
        return RouteTrace(
            np.concatenate([part.ids for part in parts]),
            first.layer_ids,
            first.num_experts,
            first.start,
            tuple(span for part in parts for span in part.spans),
            digest_of(token_ids[first.start : parts[-1].end]),
        )

    # -- bytes ---------------------------------------------------------------------------

    def to_bytes(self) -> bytes:
        """Return a self-describing form: magic, length of the header, header as JSON, raw ids."""
        header = msgspec.json.encode(self.header)
        ids = self.ids.astype(self.ids.dtype.newbyteorder("<"), copy=False)
        return MAGIC + _LENGTH.pack(len(header)) + header + ids.tobytes()

    @staticmethod
    def from_bytes(data: bytes | bytearray | memoryview) -> "RouteTrace":
        """Read what ``to_bytes`` wrote.

        Raises:
            TraceError: these are other bytes, or there are too few or too many.
        """
        view, at = memoryview(data), len(MAGIC) + _LENGTH.size
        _expect(bytes(view[: len(MAGIC)]) == MAGIC and len(view) >= at, "these bytes are no trace")
        (length,) = _LENGTH.unpack(view[len(MAGIC) : at])
        try:
            header = msgspec.json.decode(view[at : at + length], type=RouteHeader)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise TraceError(f"the header cannot be read: {error}") from None
        return RouteTrace.from_header(header, view[at + length :])

    @staticmethod
    def from_header(header: RouteHeader, data: bytes | bytearray | memoryview) -> "RouteTrace":
        """Return the trace of a header and its raw ids."""
        _expect(header.dtype in ("uint8", "uint16"), f"dtype is {header.dtype!r}")
        dtype = np.dtype(header.dtype).newbyteorder("<")
        size = _num_ids(header.shape) * dtype.itemsize
        _expect(len(data) == size, f"{len(data)} bytes of ids; the shape needs {size}")
        try:
            digest = bytes.fromhex(header.token_digest)
        except ValueError:
            raise TraceError(
                f"token_digest is {header.token_digest!r}; give 32 hex digits"
            ) from None
        ids = np.frombuffer(data, dtype=dtype).reshape(header.shape).astype(header.dtype)
        return RouteTrace(
            ids, header.layer_ids, header.num_experts, header.start, header.spans, digest
        )


def _num_ids(shape: tuple[int, ...]) -> int:
    """Return the ids of a shape that somebody else has written."""
    is_shape = all(0 <= length <= MAX_LENGTH for length in shape)
    _expect(is_shape, f"shape is {shape}; give lengths from 0 to {MAX_LENGTH}")
    return math.prod(shape)


def _of_base64(data: object) -> bytes:
    if not isinstance(data, (str, bytes)):
        raise TraceError(
            f"the rows are {kind_of(data)}, not base64: the request did not ask for them, or it "
            "was aborted before its prompt was computed"
        )
    try:
        return base64.b64decode(data, validate=True)
    except ValueError as error:  # also of text that is not ASCII
        raise TraceError(f"this is no base64: {error}") from None


# -- layouts of other engines ----------------------------------------------------------------


def from_sglang(
    data: str | bytes,
    token_ids: Sequence[int],
    *,
    num_hidden_layers: int,
    layer_ids: Sequence[int],
    num_experts: int,
    num_experts_per_tok: int,
    start: int = 0,
) -> RouteTrace:
    """Read ``meta_info.routed_experts`` of SGLang: base64 of int32 [T, all layers, K], headerless.

    Args:
        data: the base64 text.
        token_ids: prompt and output; the rows are those of ``[start, len(token_ids) - 1)``.
        num_hidden_layers: of the model, dense layers included.
        layer_ids: its MoE layers; the columns of the others must be 0.
        num_experts, num_experts_per_tok: of the model.
        start: the request's ``routed_experts_start_len``, which the reply does not repeat.

    Raises:
        TraceError: this is no base64, the rows are not as many as the tokens ask for, or an id is
            none.
    """
    content = _of_base64(data)
    _expect(len(content) % 4 == 0, f"{len(content)} bytes are no 32-bit ids")
    raw = np.frombuffer(content, dtype="<i4")
    rows = len(token_ids) - 1 - start
    want = rows * num_hidden_layers * num_experts_per_tok
    _expect(len(raw) == want, f"{len(raw)} ids, but {rows} rows of the model need {want}")
    return _of_all_layers(
        raw.reshape(rows, num_hidden_layers, num_experts_per_tok),
        token_ids,
        layer_ids=layer_ids,
        num_experts=num_experts,
        start=start,
    )


def from_vllm(
    value: Mapping[str, Any],
    token_ids: Sequence[int],
    *,
    layer_ids: Sequence[int],
    num_experts: int,
) -> RouteTrace:
    """Read ``routed_experts`` of vLLM: ``{data, shape, dtype, start}``, data raw or base64.

    ``shape`` is [T, all layers, K]. Arguments as in ``from_sglang``; ``start`` may be left out.

    Raises:
        TraceError: a field is missing or does not fit the others.
    """
    missing = [name for name in ("data", "shape", "dtype") if name not in value]
    _expect(not missing, f"the fields {missing} are missing")
    dtype = str(value["dtype"])
    _expect(dtype in ("uint8", "uint16", "int16", "int32"), f"dtype is {dtype!r}")
    data = value["data"]
    raw = _of_base64(data) if isinstance(data, str) else bytes(data)
    shape = tuple(int(n) for n in cast(Sequence[int], value["shape"]))
    size = _num_ids(shape) * np.dtype(dtype).itemsize
    _expect(len(shape) == 3 and len(raw) == size, f"{len(raw)} bytes do not fill shape {shape}")
    return _of_all_layers(
        np.frombuffer(raw, dtype=np.dtype(dtype).newbyteorder("<")).reshape(shape),
        token_ids,
        layer_ids=layer_ids,
        num_experts=num_experts,
        start=int(value.get("start") or 0),
    )


def _of_all_layers(
    ids: NDArray[Any],
    token_ids: Sequence[int],
    *,
    layer_ids: Sequence[int],
    num_experts: int,
    start: int,
) -> RouteTrace:
    """Keep the MoE layers of rows over all layers, whose others say nothing and are 0."""
    is_moe = np.zeros(ids.shape[1], dtype=bool)
    _expect(
        all(0 <= layer < len(is_moe) for layer in layer_ids),
        f"MoE layers {tuple(layer_ids)}, but there are {len(is_moe)} layers",
    )
    is_moe[list(layer_ids)] = True
    _expect(not ids[:, ~is_moe].any(), "a dense layer has experts; are layer_ids the model's?")
    return RouteTrace.of_tokens(
        ids[:, is_moe], token_ids, layer_ids=layer_ids, num_experts=num_experts, start=start
    )


def _cut(span: CaptureSpan, begin: int, end: int) -> CaptureSpan:
    start, stop = max(span.start, begin), min(span.end, end)
    return msgspec.structs.replace(
        span, start=start, end=stop, num_differing=min(span.num_differing, max(stop - start, 0))
    )


def _check_range(ids: NDArray[Any], num_experts: int, start: int) -> None:
    is_signed = ids.dtype.kind != "u"
    if ids.size and (int(ids.max()) >= num_experts or (is_signed and int(ids.min()) < 0)):
        bad = ((ids >= num_experts) | (ids < 0)).any(axis=-1)
        _expect_rows(bad, start, f"an id outside 0 to {num_experts - 1}")


def _expect_rows(is_bad: NDArray[np.bool_] | np.bool_, start: int, what: str) -> None:
    """Raise TraceError, naming the first of the bad rows [T, L], if there is one."""
    if is_bad.any():
        row, layer = np.argwhere(is_bad)[0]
        raise TraceError(f"the row of position {start + row}, MoE layer number {layer}, has {what}")


def _expect(condition: bool, message: str) -> None:
    if not condition:
        raise TraceError(message)
