"""How each kernel cuts its work: numbers only, one frozen class an op.

Owns the classes and ``TileTable``, which chooses them by shape and device. Kernels take what they
are given: a choice made anywhere else could not be repeated by a trainer that must get the same
bits. Nothing here may depend on what the host cannot know when a graph is recorded.
"""

from dataclasses import dataclass

from dovetail.kernels.backend import KEY_BLOCK


@dataclass(frozen=True, slots=True)
class RowTiles:
    """Ops that go through rows: a row a program."""

    num_warps: int


@dataclass(frozen=True, slots=True)
class RotateTiles:
    """``rotate_and_store``: how many heads of a token a program takes."""

    heads: int
    num_warps: int


@dataclass(frozen=True, slots=True)
class SplitTiles:
    """``split_keys``.

    Attributes:
        num_extra: items there may be beyond one a tile; 0 divides nothing.
        min_keys: fewest keys that are worth an item; a multiple of ``KEY_BLOCK``.
    """

    num_extra: int
    min_keys: int


@dataclass(frozen=True, slots=True)
class AttentionTiles:
    """``paged_attention``: keys a turn of the loop, at most as wide as a program's work."""

    keys: int
    num_warps: int
    num_stages: int


@dataclass(frozen=True, slots=True)
class SlotwiseTiles:
    """``fused_moe`` for few tokens: one matrix-vector product for each token and expert.

    Attributes:
        up_columns, down_columns: outputs a program computes.
        up_depth, down_depth: inputs it goes through in a turn.
    """

    up_columns: int
    up_depth: int
    down_columns: int
    down_depth: int
    num_warps: int


@dataclass(frozen=True, slots=True)
class GemmTiles:
    """One grouped matrix product: outputs a program computes, inputs in a turn."""

    columns: int
    depth: int
    num_warps: int
    num_stages: int


@dataclass(frozen=True, slots=True)
class GroupedTiles:
    """``fused_moe`` for many tokens: tokens of the same expert together, ``rows`` at a time."""

    rows: int
    up: GemmTiles
    down: GemmTiles


@dataclass(frozen=True, slots=True)
class SampleTiles:
    """``sample_plain``: tokens of the vocabulary a turn, and programs that share a row."""

    tokens: int
    num_splits: int
    num_warps: int


@dataclass(frozen=True, slots=True)
class TruncateTiles:
    """``truncate``.

    Attributes:
        row: of what goes through whole rows.
        tokens: a turn of the one program that goes through what was gathered of a row.
        num_warps: of that program.
    """

    row: SampleTiles
    tokens: int
    num_warps: int


def ceil_div(a: int, b: int) -> int:
    """Return ``a / b``, rounded up."""
    return -(-a // b)


def power_of_two(n: int) -> int:
    """Return the least power of two that is at least ``n``."""
    return 1 << (n - 1).bit_length()


@dataclass(frozen=True, slots=True)
class TileTable:
    """The tiles of one device, by shape.

    Those of attention and of grouped experts are what ``benchmarks/tiles.py`` found best on an
    H200; the others were chosen by hand.

    Attributes:
        num_processors: the streaming multiprocessors of the device.
    """

    num_processors: int

    def row(self, width: int) -> RowTiles:
        """Rows of ``width`` elements."""
        return RowTiles(num_warps=4 if width <= 2048 else 8)

    def rotate(self, num_tokens: int, num_heads: int) -> RotateTiles:
        """``num_heads`` counts q, k and v."""
        heads = 4 if num_tokens * num_heads <= 64 * self.num_processors else 16
        return RotateTiles(heads=heads, num_warps=4 if heads > 4 else 2)

    def split(self, num_tiles: int, max_tokens: int, num_kv_heads: int) -> SplitTiles:
        """Decode rows share out their keys; chunks of prompts have queries enough."""
        if max_tokens > 8:
            return SplitTiles(num_extra=0, min_keys=KEY_BLOCK)
        whole = num_tiles * num_kv_heads  # programs if nothing were divided
        if whole >= 2 * self.num_processors:
            num_extra = ceil_div(2 * self.num_processors, num_kv_heads)
            return SplitTiles(num_extra=num_extra, min_keys=4 * KEY_BLOCK)
        turns = 4 if num_tiles > 8 else 2
        num_extra = ceil_div(turns * self.num_processors, num_kv_heads)
        return SplitTiles(num_extra=num_extra, min_keys=KEY_BLOCK)

    def attention(self, num_queries: int, key_bytes: int, num_programs: int) -> AttentionTiles:
        """By what a program attends with, and to; keys of a turn wait in shared memory.

        Args:
            num_queries: tokens of a tile times query heads of a KV head.
            key_bytes: of one key.
            num_programs: work items times KV heads. Many hide each other's waits, few do not.
        """
        keys, num_stages = (64, 3) if key_bytes <= 512 else (32, 2)
        if num_queries <= 16:
            if num_programs > 4 * self.num_processors:
                return AttentionTiles(keys=32, num_warps=2, num_stages=num_stages)
            return AttentionTiles(keys=keys, num_warps=4, num_stages=num_stages)
        if num_queries <= 64:
            return AttentionTiles(keys=keys, num_warps=4, num_stages=2)
        keys = 128 if key_bytes <= 256 else keys
        return AttentionTiles(keys=keys, num_warps=8, num_stages=num_stages)

    def prefill_tokens(self, group: int) -> int:
        """``QueryTiles.max_tokens`` for prompt chunks; ``group``: query heads of a KV head."""
        return max(1, 128 // power_of_two(group))

    def experts(
        self, num_tokens: int, top_k: int, num_experts: int, itemsize: int
    ) -> SlotwiseTiles | GroupedTiles:
        """By the tokens that an expert has on average, padding included, and bytes of a number."""
        if num_tokens <= 4:
            return SlotwiseTiles(
                up_columns=4, up_depth=1024, down_columns=4, down_depth=256, num_warps=4
            )

        def tiles(
            rows: int, columns: int, depth_bytes: int, warps: int, stages: int
        ) -> GroupedTiles:
            depth = depth_bytes // itemsize
            up, down = (GemmTiles(n, depth, warps, stages) for n in (columns, 2 * columns))
            return GroupedTiles(rows=rows, up=up, down=down)

        mean = num_tokens * top_k / num_experts
        if mean <= 8:
            return tiles(16, 64, 256, 4, 4)
        if mean <= 24:
            return tiles(32, 64, 256, 4, 3)
        if mean <= 64:
            return tiles(64, 64, 128, 4, 4)
        return tiles(128, 128, 128, 8, 4)

    def sample(self, num_rows: int, vocab_size: int) -> SampleTiles:
        """So many programs a row that each processor has some."""
        tokens = 1024
        wanted = ceil_div(8 * self.num_processors, num_rows)
        return SampleTiles(
            tokens=tokens,
            num_splits=min(wanted, ceil_div(vocab_size, tokens)),
            num_warps=4,
        )

    def truncate(self, num_rows: int, vocab_size: int) -> TruncateTiles:
        """Of many rows, two share a processor; of few, each has one."""
        row = self.sample(num_rows, vocab_size)
        if num_rows <= self.num_processors:
            return TruncateTiles(row=row, tokens=2048, num_warps=16)
        return TruncateTiles(row=row, tokens=1024, num_warps=8)
