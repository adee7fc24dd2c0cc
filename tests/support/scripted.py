"""A scripted device with pages, and configurations that need no model folder.

Owns a stand-in for the device that is quick enough for thousands of schedules. What it answers
depends on every token that it finds through a sequence's page table, so a page that is stale,
foreign or written twice changes the output. Imports no torch.
"""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from dovetail.config.capture import column_specs
from dovetail.config.model import ModelConfig, MoeConfig, RopeConfig
from dovetail.config.payload import readout_bytes, sample_score_bytes
from dovetail.config.schema import EngineConfig, PolicyName
from dovetail.exec.fake import FakeExecutor
from dovetail.exec.pending import PendingStep
from dovetail.sched.plan import FROM_DEVICE, ReadRows, RowStatus, Score, StepPlan, TokenScores

VOCAB_SIZE = 32
EOS_ID = 2
MAX_TOP = 4

Tokens = Sequence[int]


def plain_config(
    *,
    context_len: int = 32,
    page_size: int = 4,
    num_pages: int = 16,
    chunk_size: int = 8,
    max_running: int = 4,
    depth: int = 1,
    prefix_cache: bool = True,
    policy: PolicyName = "fcfs",
    max_payload_bytes: int | None = None,
    capture: tuple[str, ...] = (),
    moe: MoeConfig | None = None,
) -> EngineConfig:
    """Return a configuration as ``resolve`` would, of a model that has no weights.

    The payload is as small as it may be: one read-out, and a sampled token's scores for each row.
    """
    model = plain_model(context_len, moe)
    columns = column_specs(model, capture).values()
    least_payload = readout_bytes(context_len, columns) + sample_score_bytes(max_running)
    return EngineConfig(
        model_folder="",
        model=model,
        dtype="float32",
        device="cpu",
        depth=depth,
        page_size=page_size,
        memory_fraction=None,
        num_pages=num_pages,
        context_len=context_len,
        max_running=max_running,
        max_queued=4096,
        chunk_size=chunk_size,
        max_step_tokens=chunk_size + max_running,
        max_payload_bytes=max_payload_bytes or least_payload,
        policy=policy,
        prefix_cache=prefix_cache,
        capture=capture,
        num_threads=1,
        lanes="inline",
        load_format="safetensors",
        graphs=False,
        moe_backend="torch",
        reasons={},
    )


def plain_model(context_len: int, moe: MoeConfig | None) -> ModelConfig:
    """Return the shape of a Llama as small as one may be."""
    return ModelConfig(
        architecture="LlamaForCausalLM",
        vocab_size=VOCAB_SIZE,
        hidden_size=8,
        num_layers=1,
        num_heads=1,
        num_kv_heads=1,
        head_dim=8,
        intermediate_size=8,
        rms_norm_eps=1e-6,
        rope=RopeConfig(theta=1e4),
        tie_word_embeddings=False,
        qkv_bias=False,
        o_bias=False,
        mlp_bias=False,
        qk_norm=False,
        sliding_window=None,
        max_position_embeddings=context_len,
        dtype="float32",
        eos_token_ids=(EOS_ID,),
        bos_token_id=None,
        moe=moe,
    )


def next_token(token_ids: Tokens) -> int:
    """The script: a token that depends on all tokens before it."""
    return hash(tuple(token_ids)) % VOCAB_SIZE


def as_sample(token_ids: Tokens, sample_index: int) -> Tokens:
    """The script: what a sample looks at instead of the tokens, so that samples differ."""
    return [*token_ids, VOCAB_SIZE + sample_index] if sample_index else token_ids


def logprob_of(token_ids: Tokens, token_id: int) -> float:
    """The script: a "logprob" that depends on a token and all before it."""
    return -float(hash((*token_ids, 10_000 + token_id)) % 4096)


def top_of(token_ids: Tokens, num_top: int) -> tuple[tuple[int, ...], tuple[float, ...]]:
    """The script: the "likeliest" ids after some tokens, and their logprobs."""
    ids = tuple(next_token([*token_ids, 1_000 + rank]) for rank in range(num_top))
    return ids, tuple(logprob_of(token_ids, 2_000 + rank) for rank in range(num_top))


def asked_of(token_ids: Tokens, num_ids: int) -> tuple[float, ...]:
    """The script: the logprobs of a request's own ids after some tokens."""
    return tuple(logprob_of(token_ids, 3_000 + index) for index in range(num_ids))


@dataclass
class Step:
    """What one submitted plan touched.

    Attributes:
        read: pages whose tokens its rows read.
        read_out: pages whose tokens its read-outs read, until those have been taken.
        written: pages its rows wrote.
        reused: pages that new tenants found filled.
    """

    read: set[int] = field(default_factory=set)
    read_out: set[int] = field(default_factory=set)
    written: set[int] = field(default_factory=set)
    reused: set[int] = field(default_factory=set)


@dataclass
class _Slot:
    table: dict[int, int] = field(default_factory=dict)
    num_tokens: int = 0
    last_token: int = -1
    sample_index: int = 0


class PagedFake:
    """Runs plans at once, in order, on pages of token ids.

    Rows, handles and pages are checked by the ``FakeExecutor`` inside.

    Attributes:
        steps: what each plan touched, by step id.
        written_by: page -> the step that wrote it last.
    """

    def __init__(
        self,
        *,
        num_slots: int,
        page_size: int,
        script: Callable[[Tokens], int] = next_token,
        status: Callable[[Tokens], RowStatus] = lambda token_ids: RowStatus.OK,
    ) -> None:
        self._script, self._status, self._page_size = script, status, page_size
        self._pages: dict[int, list[int]] = {}
        self._slots = [_Slot() for _ in range(num_slots)]
        self._tokens: deque[int] = deque()
        self._statuses: deque[RowStatus] = deque()
        self._fake = FakeExecutor(
            lambda _: self._tokens.popleft(),
            num_slots=num_slots,
            page_size=page_size,
            status=lambda _: self._statuses.popleft(),
        )
        self.steps: dict[int, Step] = {}
        self.written_by: dict[int, int] = {}

    def submit(self, plan: StepPlan) -> PendingStep:
        """Run a plan; see ``StepExecutor``."""
        step = self.steps[plan.step_id] = Step()
        captured = tuple(
            {
                column: np.array(self._read(r.slot, r.end)[r.start :], dtype=np.int32)
                for column in r.columns
            }
            for r in plan.readouts
        )
        for r in plan.readouts:
            step.read_out |= self._pages_of(r.slot, r.end)  # from 0 on: all are its own
        new = plan.slot_writes
        for slot, sample_index in zip(new.slot.tolist(), new.sample_index.tolist(), strict=True):
            self._slots[slot] = _Slot(sample_index=sample_index)
        for _, slot, index, page, _ in plan.page_writes.columns.T.tolist():
            self._slots[slot].table[index] = page
        uploaded = deque(plan.token_ids.tolist())
        rows = plan.rows
        scores, targets = deque(plan.scores), deque(plan.targets.tolist())
        scored: list[TokenScores] = []
        for row, (slot, start, width, samples) in enumerate(
            zip(rows.slot, rows.start, rows.width, rows.samples, strict=True)
        ):
            self._run_row(step, plan.step_id, slot, start, width, samples, uploaded)
            while scores and scores[0].row == row:
                score = scores.popleft()
                scored.append(self._score(score, slot, width, targets))
        assert not scores and not targets, "scores out of order, or too many targets"
        pending = self._fake.submit(plan)

        def read() -> ReadRows:
            step.read_out.clear()
            return replace(pending.readouts(), rows=captured)

        return PendingStep(plan, lambda: replace(pending.result(), scores=tuple(scored)), read)

    def update(self, work: Callable[[], None]) -> None:
        """Forget every page: what is read of one before it is written again is no token."""
        work()
        self._pages.clear()

    def close(self) -> None:
        """Nothing to let go of."""

    def _score(self, score: Score, slot: int, width: int, targets: deque[int]) -> TokenScores:
        """What the script says of each position, by what is found in the pages."""
        begin = self._slots[slot].num_tokens - width + score.first
        assert score.first >= 0 and score.first + score.count <= width
        contexts = [self._read(slot, begin + i + 1) for i in range(score.count)]
        known = [targets.popleft() for _ in contexts] if score.is_prompt else []
        tops = [top_of(context, score.num_top) for context in contexts]
        return TokenScores(
            logprobs=np.array(list(map(logprob_of, contexts, known)), dtype=np.float32),
            top_ids=_table([ids for ids, _ in tops], np.int32),
            top_logprobs=_table([values for _, values in tops], np.float32),
            id_logprobs=_table([asked_of(c, score.num_ids) for c in contexts], np.float32),
        )

    def _run_row(
        self,
        step: Step,
        step_id: int,
        slot: int,
        start: int,
        width: int,
        samples: int,
        uploaded: deque[int],
    ) -> None:
        state = self._slots[slot]
        if start == FROM_DEVICE:
            token_ids, start = [state.last_token], state.num_tokens
        else:
            token_ids = [uploaded.popleft() for _ in range(width)]
            if not state.num_tokens:
                step.reused |= self._pages_of(slot, start)
        for position, token_id in enumerate(token_ids, start):
            page = state.table[position // self._page_size]
            content = self._pages.setdefault(page, [-1] * self._page_size)
            content[position % self._page_size] = token_id
            step.written.add(page)
            self.written_by[page] = step_id
        state.num_tokens = start + width
        step.read |= self._pages_of(slot, state.num_tokens)
        self._statuses.append(RowStatus.OK)
        if samples:
            context = self._read(slot, state.num_tokens)
            self._statuses[-1] = self._status(context)
            state.last_token = self._script(as_sample(context, state.sample_index))
            self._tokens.append(state.last_token)

    def _pages_of(self, slot: int, num_tokens: int) -> set[int]:
        table = self._slots[slot].table
        return {table[index] for index in range(-(-num_tokens // self._page_size))}

    def _read(self, slot: int, num_tokens: int) -> list[int]:
        table, size = self._slots[slot].table, self._page_size
        return [self._pages[table[p // size]][p % size] for p in range(num_tokens)]


def _table(rows: Sequence[Tokens | Sequence[float]], dtype: type[np.generic]) -> np.ndarray:
    return np.array(rows, dtype=dtype)
