"""The operations of a step on an accelerator, as one object that is handed down.

Owns the protocol ``Kernels``, where each operation is documented, and the work lists that attention
reads. ``kernels.ref.backend`` implements it in plain torch on any device and is the oracle;
``kernels.triton.backend`` is for NVIDIA GPUs. ``kernels.registry`` loads one by name. Must not know
models, layers or steps.

What differs from ``kernels.api``: everything can be recorded in a CUDA graph. Nothing waits for the
device, results have shapes that follow from the shapes of the inputs, and what a host cannot know
when it records (lengths, slots, which rows are real) is read from device memory. So padded rows and
tokens are legal everywhere: they give finite junk, and where an operation writes into engine state,
their slot is a *sink*, a slot that nobody reads and several may write.

Shape legend: T tokens, H query heads, K KV heads or, in the mixture-of-experts ops, experts per
token, D head dim, F = (H + 2 K) D, P positions, C cache slots, S slots of the page table, B pages
of a sequence, N query tiles or rows that sample, W work items, L MoE layers, M model dim,
E experts, I expert inner dim, V vocabulary.
"""

from dataclasses import dataclass
from typing import NamedTuple, Protocol

from torch import Tensor

KEY_BLOCK = 64
"""Keys are divided among work items in blocks of this many."""


@dataclass(frozen=True, slots=True)
class QueryTiles:
    """Which tokens of a step attend, and to what; filled on the device before each forward.

    A tile is a run of neighbouring tokens of one sequence. Its row in ``tiles_N4`` is

        slot         the sequence's row in the page table
        first_token  index, within the step, of the tile's first token
        num_tokens   at most ``max_tokens``; 0 leaves the entry unused
        kv_len       cached tokens of the sequence, up to the tile's last token and including it;
                     0 for padding, which gets zeros

    Token j of a tile has position ``kv_len - num_tokens + j`` and sees the keys up to it.

    Every token of the step, padding included, lies in one tile of one of the step's lists: the
    output of any other is not written. Unused entries may stand anywhere. So with R padded rows and
    T padded tokens,

    * a list of decode rows has N = R and ``max_tokens`` 1; entry r is row r, or ``(0, r, 1, 0)`` if
      r is padding. Rows of a draft that is verified are the same with a greater ``max_tokens``;
    * a list of prompt chunks has N = R + ceil(T / max_tokens): a row of w tokens that begins at
      token f, after p cached ones, has ceil(w / max_tokens) tiles
      ``(slot, f + i * max_tokens, n, p + i * max_tokens + n)``, and padded tokens are a row of
      slot 0 whose ``kv_len`` is 0.

    Attributes:
        tiles_N4: int32.
        max_tokens: most tokens of a tile.
    """

    tiles_N4: Tensor
    max_tokens: int


@dataclass(frozen=True, slots=True)
class WorkItems:
    """Query tiles with their keys divided, so that the processors are evenly loaded.

    Made once a step and attention window, by ``Kernels.split_keys``, for all layers. A row of
    ``items_W8`` is the four numbers of its tile and

        kv_begin, kv_end       the keys this item goes through; kv_begin is a multiple of KEY_BLOCK
        first_item, num_items  where the tile's items stand, one after the other

    Items of tiles that are divided come first: the first ``num_partials`` at most. An entry whose
    num_tokens is 0 is unused.

    Attributes:
        items_W8: int32.
        arrivals_WK: int32, how many of a tile's items are done, at its first item: 0 between calls.
        num_partials: most items that belong to divided tiles.
        max_tokens: most tokens of a tile.
        window: see ``Kernels.split_keys``.
    """

    items_W8: Tensor
    arrivals_WK: Tensor
    num_partials: int
    max_tokens: int
    window: int | None


class Capture(NamedTuple):
    """Where the chosen experts of each token are recorded.

    Attributes:
        routes_CLK: uint8 or uint16, the sidecar by cache slot; every expert id must fit.
        kv_slots_T: int64, the tokens' cache slots; the sink for padding.
        moe_layer: index among the MoE layers.
    """

    routes_CLK: Tensor
    kv_slots_T: Tensor
    moe_layer: int


class PlainDraws(NamedTuple):
    """One draw a row, from logits as they are.

    Attributes:
        ids_N: int64, the drawn tokens.
        logprobs_N: float32, of the drawn tokens: log-softmax at the row's temperature.
        status_N: int64; 0 is good, 1 means logits that are not finite: the id then means nothing,
            but is a legal id.
        log_total_N: float32, logsumexp of the logits at the row's temperature.
    """

    ids_N: Tensor
    logprobs_N: Tensor
    status_N: Tensor
    log_total_N: Tensor


class ShapedLogits(NamedTuple):
    """What rows are drawn from where something shapes draws.

    Attributes:
        raw_NV: float32, the model's own; contiguous.
        changed_NV: float32, contiguous: after penalties and biases, of rows that have some. Of all
            others, junk.
        is_changed_N: int32, which rows those are.
    """

    raw_NV: Tensor
    changed_NV: Tensor
    is_changed_N: Tensor


class Borders(NamedTuple):
    """What truncation leaves of rows: tokens of larger scaled logits, and equal ones up to an id.

    Attributes:
        least_N: float32; -inf where nothing is cut off.
        last_N: int32.
    """

    least_N: Tensor
    last_N: Tensor


class LayerKernels(Protocol):
    """The operations that layers call themselves; ``kernels.api`` has them too."""

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """See ``kernels.api.linear``."""
        ...

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """See ``kernels.api.rms_norm``."""
        ...

    def add_rms_norm(
        self, x: Tensor, residual: Tensor, weight: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        """See ``kernels.api.add_rms_norm``."""
        ...

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        """See ``kernels.api.silu_mul``; rounded once."""
        ...

    def route(
        self, logits_TE: Tensor, k: int, norm_topk_prob: bool, *, capture: Capture | None = None
    ) -> tuple[Tensor, Tensor]:
        """Choose each token's experts, and record them.

        Softmax over all experts in float32, then the k experts of largest logit; of equal logits
        the lower id goes first. NaN counts as the least logit: ids are legal and different ones
        whatever the logits are.

        Args:
            logits_TE: any float dtype.
            k: experts per token.
            norm_topk_prob: whether to rescale each token's k weights to sum to 1.
            capture: where to record the ids; None records nothing.

        Returns:
            Weights, float32 [T, K], and ids, int32 (``kernels.api``: int64) [T, K], both by
            descending logit.
        """
        ...

    def fused_moe(
        self,
        x_TM: Tensor,
        ids_TK: Tensor,
        weights_TK: Tensor,
        w_gate_up_E2IM: Tensor,
        w_down_EMI: Tensor,
    ) -> Tensor:
        """See ``kernels.api.fused_moe``; ids int32 or int64, those of a token all different.

        The sums have one order: same inputs of the same shape give the same bits.
        """
        ...


class Kernels(LayerKernels, Protocol):
    """Every operation of a step. No state, so one object serves all threads and lanes."""

    def rotate_and_store(
        self,
        qkv_TF: Tensor,
        *,
        qk_norm: tuple[Tensor, Tensor, float] | None,
        cos_sin_P2D: Tensor,
        positions_T: Tensor,
        kv_slots_T: Tensor,
        k_cache_CKD: Tensor,
        v_cache_CKD: Tensor,
    ) -> Tensor:
        """Normalise and rotate q and k, store k and v in the cache, return q.

        ``qk_norm``, ``rotary`` and ``write_kv`` of ``kernels.api`` in one, computed in float32 and
        rounded once.

        Args:
            qkv_TF: of each token the query heads, the key heads, the value heads; rows may be
                strided.
            qk_norm: weights of q and k, [D] each, and epsilon; None leaves out the norms.
            cos_sin_P2D: float32, of each position the cosines (c, c) and signed sines (-s, s).
            positions_T: int32 or int64, each below P; any legal one for padding.
            kv_slots_T: int32 or int64; the sink for padding, else no slot twice.
            k_cache_CKD: one layer's keys; strided by slot if need be.
            v_cache_CKD: one layer's values.

        Returns:
            q, [T, H, D].
        """
        ...

    def tile_tokens(self, group: int) -> int:
        """Return how many tokens of a prompt chunk a query tile had best have.

        Args:
            group: query heads of a KV head.
        """
        ...

    def split_keys(
        self,
        queries: QueryTiles,
        *,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        window: int | None = None,
    ) -> WorkItems:
        """Divide the work of attention; once a step for all layers that share these numbers.

        Args:
            queries: the tiles.
            num_heads: H.
            num_kv_heads: K.
            head_dim: D.
            window: how many keys a token sees at most, itself included; None for all.
        """
        ...

    def paged_attention(
        self,
        q_THD: Tensor,
        k_cache_CKD: Tensor,
        v_cache_CKD: Tensor,
        *,
        page_table_SB: Tensor,
        page_size: int,
        work: WorkItems,
        sinks_H: Tensor | None = None,
        out_THD: Tensor | None = None,
    ) -> Tensor:
        """Attend causally over cached keys, those of the step's own tokens included.

        Softmax scale ``D ** -0.5``, softmax and sums in float32; query head h reads KV head
        ``h // (H / K)``. Memory of slots that no tile covers is not read.

        Args:
            q_THD: queries of the step's tokens.
            k_cache_CKD: one layer's keys; strided by slot if need be.
            v_cache_CKD: one layer's values.
            page_table_SB: int32 or int64, the pages of each sequence; a cache slot is
                ``page * page_size + offset``.
            page_size: a power of two.
            work: whose output is wanted.
            sinks_H: float32, a logit per head that takes part in the softmax and has no value
                (gpt-oss, arXiv 2508.10925); None for none.
            out_THD: where to write, so that the lists of one step share a result; contiguous.

        Returns:
            [T, H, D].
        """
        ...

    def sample_plain(
        self,
        logits_NV: Tensor,
        *,
        temperature_N: Tensor,
        seed_N: Tensor,
        position_N: Tensor,
        sample_index_N: Tensor,
    ) -> PlainDraws:
        """Draw one token a row where nothing truncates, penalises or biases.

        The draw of ``kernels.api.sample``, same noise included, with logprobs of kind 0.

        Args:
            logits_NV: float32, float16 or bfloat16; rows may be strided.
            temperature_N: float32; 0 is greedy.
            seed_N: int64, the bit pattern of the seed.
            position_N: int64, the index that the drawn token will have in its sequence.
            sample_index_N: int64.
        """
        ...

    def truncate(
        self,
        logits: ShapedLogits,
        *,
        temperature_N: Tensor,
        top_k_N: Tensor,
        top_p_N: Tensor,
        min_p_N: Tensor,
        work_NV: Tensor,
        out: Borders,
    ) -> Borders:
        """Truncate as ``kernels.api.sample`` does, to the same tokens.

        Args:
            logits: what is truncated, before it is divided by the temperature.
            temperature_N: float32; 0 is greedy and cuts nothing.
            top_k_N: int32, 0 keeps all.
            top_p_N, min_p_N: float32; 1 and 0 keep all.
            work_NV: int32, contiguous; room to work in.
            out: where to write, and what is returned.
        """
        ...

    def sample_shaped(
        self,
        logits: ShapedLogits,
        borders: Borders,
        *,
        temperature_N: Tensor,
        seed_N: Tensor,
        position_N: Tensor,
        sample_index_N: Tensor,
        logprob_kind_N: Tensor,
    ) -> PlainDraws:
        """Draw one token a row, of those within its border; else as ``sample_plain``.

        A row that nothing shapes gets the bits that ``sample_plain`` gives it among as many rows.

        Args:
            logits: what is drawn from.
            borders: see ``truncate``.
            temperature_N, seed_N, position_N, sample_index_N: see ``sample_plain``.
            logprob_kind_N: int32, see ``kernels.api.sample``.

        Returns:
            Logprobs and totals are of the row's kind. Status 2 means that no token was left.
        """
        ...

    def spread(
        self,
        logits: ShapedLogits,
        borders: Borders,
        *,
        temperature_N: Tensor,
        logprob_kind_N: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return what ``sample_shaped`` drew from, row by row, as ``kernels.api.Draws`` has it.

        Returns:
            ``scaled_NV``, ``reported_NV`` and ``outside_NV``.
        """
        ...
