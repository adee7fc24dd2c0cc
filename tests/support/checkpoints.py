"""Makers of tiny checkpoints in the layout of the Hugging Face hub.

Owns random models, big enough in weight scale that greedy output is varied and few choices are
near ties, and a byte-level tokenizer. Must not know the package under test, nor need Hugging Face
modules: files are written tensor by tensor, as they are found on the hub.
"""

import json
from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
NUM_BYTES = 256
EOS_ID = NUM_BYTES  # <|endoftext|>
VOCAB_SIZE = 320

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

Tensors = dict[str, torch.Tensor]


def byte_tokenizer(
    folder: Path, *, vocab_size: int = VOCAB_SIZE, eos_id: int | None = EOS_ID
) -> Path:
    """Write a tokenizer whose ids 0 to 255 are the bytes, followed by the special tokens.

    Ids beyond them decode to ``<id>`` and are never the result of encoding, so that every id of
    the model has a text of its own. A vocabulary below 256 has the first bytes alone.
    """
    # The alphabet of GPT-2: printable bytes stand for themselves, others are moved beyond 255.
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    moved = iter(range(256, 512))
    letters = [chr(b if b in printable else next(moved)) for b in range(NUM_BYTES)]
    words = [*letters, *SPECIAL_TOKENS]
    words += [f"<{token_id}>" for token_id in range(len(words), vocab_size)]
    words = words[:vocab_size]
    tokenizer = Tokenizer(models.BPE(vocab={word: i for i, word in enumerate(words)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(
        [AddedToken(word, special=True) for word in SPECIAL_TOKENS if word in words]
    )
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    _write_json(
        folder / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "eos_token": None if eos_id is None else words[eos_id],
            "clean_up_tokenization_spaces": False,
            "chat_template": CHAT_TEMPLATE,
        },
    )
    return folder


def write_checkpoint(
    folder: Path, config: dict, tensors: Tensors, dtype: torch.dtype = torch.float32
) -> Path:
    """Write config, generation config, weights and the byte-level tokenizer."""
    folder = byte_tokenizer(folder, vocab_size=config["vocab_size"], eos_id=config["eos_token_id"])
    torch_dtype = str(dtype).removeprefix("torch.")
    _write_json(folder / "config.json", {**config, "torch_dtype": torch_dtype})
    _write_json(
        folder / "generation_config.json",
        {"eos_token_id": config["eos_token_id"], "bos_token_id": None, "do_sample": False},
    )
    save_file(
        {name: tensor.to(dtype).contiguous() for name, tensor in tensors.items()},
        folder / "model.safetensors",
        metadata={"format": "pt"},
    )
    return folder


def decoder_config(
    family: str,
    *,
    vocab_size: int = VOCAB_SIZE,
    num_layers: int = 2,
    hidden_size: int = 64,
    intermediate_size: int = 128,
    num_heads: int = 4,
    num_kv_heads: int = 2,
    head_dim: int = 16,
    context_len: int = 1024,
    rope_theta: float = 10000.0,
    eos_id: int | None = EOS_ID,
    tied: bool = False,
    **more: object,
) -> dict:
    """Return a ``config.json`` of a model family: "llama", "qwen3" or "qwen3_moe"."""
    architecture = {"llama": "Llama", "qwen3": "Qwen3", "qwen3_moe": "Qwen3Moe"}[family]
    return {
        "architectures": [f"{architecture}ForCausalLM"],
        "model_type": family,
        "vocab_size": vocab_size,
        "num_hidden_layers": num_layers,
        "hidden_size": hidden_size,
        "intermediate_size": intermediate_size,
        "num_attention_heads": num_heads,
        "num_key_value_heads": num_kv_heads,
        "head_dim": head_dim,
        "max_position_embeddings": context_len,
        "rope_theta": rope_theta,
        "rms_norm_eps": 1e-6,
        "hidden_act": "silu",
        "attention_bias": False,
        "tie_word_embeddings": tied,
        "bos_token_id": None,
        "eos_token_id": eos_id,
        **more,
    }


def random_tensors(config: dict, seed: int = 0, device: str = "cpu") -> Tensors:
    """Return random weights for a ``decoder_config``; each device has numbers of its own.

    Layers of a tied model are louder than its embeddings, lest it repeats its last token.
    """
    gain = 1.5 if config["tie_word_embeddings"] else 1.0
    draw = _Weights(seed, gain, device)
    hidden, head_dim = config["hidden_size"], config["head_dim"]
    q_size = config["num_attention_heads"] * head_dim
    kv_size = config["num_key_value_heads"] * head_dim
    moe = config["model_type"] == "qwen3_moe"
    tensors = {
        "model.embed_tokens.weight": draw.matrix(config["vocab_size"], hidden, gain=2.0),
        "model.norm.weight": draw.norm(hidden),
    }
    if not config["tie_word_embeddings"]:
        tensors["lm_head.weight"] = draw.matrix(config["vocab_size"], hidden, gain=2.0)
    for index in range(config["num_hidden_layers"]):
        layer, attention = f"model.layers.{index}", f"model.layers.{index}.self_attn"
        tensors |= {
            f"{layer}.input_layernorm.weight": draw.norm(hidden),
            f"{layer}.post_attention_layernorm.weight": draw.norm(hidden),
            f"{attention}.q_proj.weight": draw.matrix(q_size, hidden),
            f"{attention}.k_proj.weight": draw.matrix(kv_size, hidden),
            f"{attention}.v_proj.weight": draw.matrix(kv_size, hidden),
            f"{attention}.o_proj.weight": draw.matrix(hidden, q_size),
        }
        if config["model_type"].startswith("qwen3"):
            tensors[f"{attention}.q_norm.weight"] = gain * draw.norm(head_dim)
            tensors[f"{attention}.k_norm.weight"] = gain * draw.norm(head_dim)
        if moe and index not in config["mlp_only_layers"]:
            tensors[f"{layer}.mlp.gate.weight"] = draw.matrix(
                config["num_experts"], hidden, gain=1.0
            )
            for expert in range(config["num_experts"]):
                tensors |= draw.mlp(
                    f"{layer}.mlp.experts.{expert}", hidden, config["moe_intermediate_size"]
                )
        else:
            tensors |= draw.mlp(f"{layer}.mlp", hidden, config["intermediate_size"])
    return tensors


def random_llama(folder: Path, seed: int = 0, **config: object) -> Path:
    """Write a random Llama; ``config`` goes to ``decoder_config``."""
    decided = decoder_config("llama", **config)
    return write_checkpoint(folder, decided, random_tensors(decided, seed))


def random_qwen3(folder: Path, seed: int = 0, *, tied: bool = True, **config: object) -> Path:
    """Write a random Qwen3, with tied embeddings as the small ones of the hub have."""
    decided = decoder_config("qwen3", tied=tied, rope_theta=1e6, **config)
    return write_checkpoint(folder, decided, random_tensors(decided, seed))


def random_qwen3_moe(
    folder: Path,
    seed: int = 0,
    *,
    num_experts: int = 8,
    experts_per_token: int = 2,
    expert_size: int = 32,
    dense_layers: Sequence[int] = (),
    device: str = "cpu",
    dtype: torch.dtype = torch.float32,
    **config: object,
) -> Path:
    """Write a random Qwen3-MoE whose layers are all MoE but ``dense_layers``.

    A large one is drawn on a GPU and written in bfloat16.
    """
    decided = decoder_config(
        "qwen3_moe",
        rope_theta=1e6,
        num_experts=num_experts,
        num_experts_per_tok=experts_per_token,
        moe_intermediate_size=expert_size,
        mlp_only_layers=list(dense_layers),
        decoder_sparse_step=1,
        norm_topk_prob=True,
        **config,
    )
    return write_checkpoint(folder, decided, random_tensors(decided, seed, device), dtype)


class _Weights:
    """Random weights from one seeded generator."""

    def __init__(self, seed: int, gain: float, device: str):
        self._gain = gain
        self._generator = torch.Generator(device).manual_seed(seed)

    def matrix(self, rows: int, columns: int, gain: float | None = None) -> torch.Tensor:
        """A matrix that makes outputs of standard deviation ``gain`` from inputs of 1."""
        scale = (self._gain if gain is None else gain) / columns**0.5
        return scale * self._normal(rows, columns)

    def norm(self, size: int) -> torch.Tensor:
        return 1 + 0.1 * self._normal(size)

    def _normal(self, *shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=self._generator, device=self._generator.device)

    def mlp(self, name: str, hidden: int, size: int) -> Tensors:
        return {
            f"{name}.gate_proj.weight": self.matrix(size, hidden),
            f"{name}.up_proj.weight": self.matrix(size, hidden),
            f"{name}.down_proj.weight": self.matrix(hidden, size),
        }


def _write_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
