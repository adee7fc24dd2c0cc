"""What a user may configure, and what the engine decided.

Owns two different types on purpose: ``EngineOptions`` is what somebody typed
(None means "decide for me"); ``EngineConfig`` is complete, and each of its values
comes with a reason. ``config.resolve`` alone turns one into the other.
"""

from pathlib import Path
from typing import Literal

import msgspec

from dovetail.config.capture import ColumnSpec, column_specs
from dovetail.config.hub import EMBEDDED_MODEL
from dovetail.config.model import ModelConfig

TOKENIZER_FILE = "tokenizer.json"
PolicyName = Literal["fcfs", "priority", "longest-prefix"]
DTypeName = Literal["float32", "bfloat16"]
DeviceName = Literal["cpu", "cuda"]
DeviceChoice = Literal["auto", "cpu", "cuda"]
LoadFormat = Literal["safetensors", "dummy"]
MoeBackend = Literal["triton", "torch"]
MoeBackendChoice = Literal["auto", "triton", "torch"]


class EngineOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The engine's options. Every one has a working default.

    Attributes:
        model: a Hugging Face model folder, or the name of a model on the hub, such as
            ``Qwen/Qwen3-0.6B`` (needs the extra ``hub``); None is the embedded tiny MoE.
        dtype: ``float32``, ``bfloat16`` or ``auto`` (see ``config.resolve``).
        device: ``cpu``, ``cuda`` for one NVIDIA GPU, or ``auto``: the GPU, if there is one that
            runs this model with these options.
        load_format: ``safetensors``, or ``dummy`` for random weights: of the model's folder only
            ``config.json`` is then needed, and the text is that of the embedded tokenizer.
        depth: steps in flight while the next one is planned; 0 is synchronous,
            1 is overlap.
        page_size: tokens per KV page.
        kv_memory: memory of the KV pool: bytes, or a string such as ``512MiB``. Without it a GPU's
            pool is sized by ``memory_fraction``, and the host's is 512 MiB.
        memory_fraction: how full the GPU's memory may get, as a share of it, whoever takes it: the
            KV pool is what weights and the largest step leave of that, measured at start (0.9
            unless the pool's size is given). Not beside ``kv_memory`` or ``num_pages``.
        num_pages: the KV pool in pages; wins over ``kv_memory``.
        context_len: most tokens of prompt and output together; None is the model's.
        max_running: most sequences that run at once; None is 128 on a CPU, and 512 on a GPU or
            fewer where drawing for so many would take much of its memory.
        max_queued: most sequences that wait beside those that run, in an engine that is served;
            who comes when it is full is told to come again. ``dovetail.Engine`` queues all it gets.
        chunk_size: most prompt tokens forwarded in a step, up to 1048576; -1 is no limit. None is
            512 on a CPU, and 8192 on a GPU or 2048 on one with less than 40 GiB.
        policy: who of the waiting starts first: ``fcfs`` (first come, first served),
            ``priority`` (higher first), ``longest-prefix`` (most of its prompt cached first).
        prefix_cache: share computed prefixes between requests.
        capture: per-token columns that are kept beside the KV, for requests to ask for: ``experts``
            (the experts that each MoE layer chose) and ``expert_weights`` (their weights).
        num_threads: intra-op threads of the forward, torch's and numpy's; None decides by the
            model's width.
        lanes: ``inline`` runs device work at submission, ``threaded`` on a thread a lane.
        graphs: on a GPU, record steps as CUDA graphs when the engine starts.
        moe_backend: who computes the experts: ``triton`` (on a GPU), ``torch`` (its grouped matrix
            product; on a GPU the experts' sizes must be multiples of 16 bytes, and ``graphs`` need
            bfloat16 and an H100, H200, B200 or the like), or ``auto``: Triton on a GPU and torch on
            a CPU.
    """

    model: str | None = None
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    device: DeviceChoice = "auto"
    load_format: LoadFormat = "safetensors"
    depth: int | None = None
    page_size: int = 16
    kv_memory: int | str | None = None
    memory_fraction: float | None = None
    num_pages: int | None = None
    context_len: int | None = None
    max_running: int | None = None
    max_queued: int = 4096
    chunk_size: int | None = None
    policy: PolicyName = "fcfs"
    prefix_cache: bool = True
    capture: tuple[str, ...] = ()
    num_threads: int | None = None
    lanes: Literal["inline", "threaded"] = "inline"
    graphs: bool = True
    moe_backend: MoeBackendChoice = "auto"


class EngineConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The decided configuration. Made by ``config.resolve`` only.

    Attributes:
        model_folder: absolute path of the model.
        model: what its ``config.json`` says.
        dtype: of weights, activations and KV.
        memory_fraction: of the GPU's memory, up to which the pool fills it; None if the pool's size
            does not follow from what is left.
        num_pages: KV pages of the pool. Where ``memory_fraction`` is set, ``resolve`` says the
            least; the engine measures, and replaces it by what there is room for.
        max_step_tokens: most tokens of one forward: a chunk and a token per running sequence.
        max_payload_bytes: most bytes that a step returns beside its tokens: read-outs, prompt
            logprobs, top logprobs.
        reasons: field name -> who decided its value, and why.

    The other fields are those of ``EngineOptions``, decided.
    """

    model_folder: str
    model: ModelConfig
    dtype: DTypeName
    device: DeviceName
    load_format: LoadFormat
    depth: int
    page_size: int
    memory_fraction: float | None
    num_pages: int
    context_len: int
    max_running: int
    max_queued: int
    chunk_size: int
    max_step_tokens: int
    max_payload_bytes: int
    policy: PolicyName
    prefix_cache: bool
    capture: tuple[str, ...]
    num_threads: int
    lanes: str
    graphs: bool
    moe_backend: MoeBackend
    reasons: dict[str, str]

    @property
    def tokenizer_folder(self) -> str:
        """Where the tokenizer is; a model with random weights may have none of its own."""
        own = Path(self.model_folder)
        if self.load_format == "dummy" and not (own / TOKENIZER_FILE).is_file():
            return str(EMBEDDED_MODEL)
        return str(own)

    @property
    def max_pages_per_sequence(self) -> int:
        """Length of one page table: pages that hold a whole context."""
        return -(-self.context_len // self.page_size)

    @property
    def max_page_writes(self) -> int:
        """Entries of page tables that one step may change.

        As many as a whole chunk of prompts without a cached prefix needs, the last of which has a
        whole context of pages, however little of it is in the chunk; each row has one that is not
        full. Prompts whose pages are cached need more of them for fewer tokens, and may have to
        wait for the next step.
        """
        return self.chunk_size // self.page_size + self.max_running + self.max_pages_per_sequence

    @property
    def columns(self) -> dict[str, ColumnSpec]:
        """The per-token columns there are, ``tokens`` first."""
        return column_specs(self.model, self.capture)

    @property
    def max_open(self) -> int:
        """Most sequences that a served engine takes on: those that run and those that wait."""
        return self.max_running + self.max_queued
