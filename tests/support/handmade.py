"""Checkpoints whose right output is known without running them.

Owns the weights set by hand: FX-COUNT, FX-TAG and FX-MOE. A stale, lost, doubled or foreign token
or KV page shows at once in their output. All are plain checkpoints of known architectures.
"""

import math
from pathlib import Path

import torch

from tests.support.checkpoints import (
    VOCAB_SIZE,
    Tensors,
    decoder_config,
    random_qwen3_moe,
    random_tensors,
    write_checkpoint,
)

MARGIN = 20.0  # of logits: a bias of 100 still wins, and sampling at T = 1 hardly ever differs

# FX-TAG: rotary frequencies are 1e12 ** (-2i / head_dim), so pair head_dim // 8 turns by 1e-3 a
# token, and the last pair does not turn at all within the context.
TAG_ROPE_THETA = 1e12
TAG_FREQUENCY = 1e-3
TAG_SLOPE = 2.0  # attention score that a token of distance brings, in nats
TAG_BONUS = 40.0  # attention score of a tag over a filler, in nats
TAG_CODE_SIZE = 48


def fx_count(
    folder: Path, vocab_size: int = VOCAB_SIZE, *, num_layers: int = 2, **config: object
) -> Path:
    """FX-COUNT: the next token is (last + 1) modulo the vocabulary, whatever came before.

    Attention and MLP are random but their outputs are multiplied by zero. Each token has a
    random code of +1 and -1, and the head looks for the code of the token before.
    """
    decided = decoder_config(
        "llama",
        vocab_size=vocab_size,
        num_layers=num_layers,
        hidden_size=128,
        head_dim=32,
        **config,
    )
    tensors = _silenced(random_tensors(decided))
    codes = _codes(vocab_size, decided["hidden_size"])
    tensors["model.embed_tokens.weight"] = codes  # root mean square 1: the norm changes nothing
    tensors["model.norm.weight"] = torch.ones(decided["hidden_size"])
    tensors["lm_head.weight"] = codes.roll(1, dims=0) * (MARGIN / _least_distance(codes))
    return write_checkpoint(folder, decided, tensors)


def fx_tag(
    folder: Path, vocab_size: int = VOCAB_SIZE, *, num_layers: int = 2, **config: object
) -> Path:
    """FX-TAG: emits the earliest tag of the sequence for ever; ids below ``num_tags`` are tags.

    ``num_tags(vocab_size)`` is half the vocabulary; the others are fillers. Every head of the last
    layer attends to tags, to the farthest one most: each token of distance adds 2 nats (1 at
    distance 1,000), so position 0 outweighs what was emitted since, and its KV is read at every
    step. The layers before are random but their outputs are multiplied by zero.

    Needs a tag in the prompt. Context length 1024. In fp32 any prompt with a tag works; in bf16
    have 16 fillers or more between different tags, for keys are rounded.
    """
    decided = decoder_config(
        "llama",
        vocab_size=vocab_size,
        num_layers=num_layers,
        hidden_size=128,
        head_dim=32,
        rope_theta=TAG_ROPE_THETA,
        **config,
    )
    code_size, head_dim = TAG_CODE_SIZE, decided["head_dim"]
    num_heads, num_kv_heads = decided["num_attention_heads"], decided["num_key_value_heads"]
    is_tag = torch.arange(vocab_size) < num_tags(vocab_size)
    codes = _codes(vocab_size, code_size)
    tensors = _silenced(random_tensors(decided))

    # The residual stream: the token's own code, the code that was read, the tag flag, a constant.
    own, read = slice(0, code_size), slice(code_size, 2 * code_size)
    flag, constant = 2 * code_size, 2 * code_size + 1
    embedding = tensors["model.embed_tokens.weight"].zero_()
    embedding[:, own], embedding[:, flag], embedding[:, constant] = codes, is_tag.float(), 1.0

    layer = f"model.layers.{num_layers - 1}"
    tensors[f"{layer}.input_layernorm.weight"] = torch.ones(decided["hidden_size"])
    q_proj, k_proj, v_proj, o_proj = (
        tensors[f"{layer}.self_attn.{name}_proj.weight"].zero_() for name in "qkvo"
    )
    # Norm divides by the root mean square, which is all but equal for tags and fillers.
    rms = math.sqrt((code_size + 2) / decided["hidden_size"])
    # q = (0, a) and k = (-a, 0), turned by their positions, give a * a * sin(angle between).
    turning = head_dim // 8
    ramp = rms * math.sqrt(TAG_SLOPE / TAG_FREQUENCY * math.sqrt(head_dim))
    still = head_dim // 2 - 1
    bonus = rms * math.sqrt(TAG_BONUS * math.sqrt(head_dim))
    for head in range(num_heads):
        q_proj[head * head_dim + turning + head_dim // 2, constant] = ramp
        q_proj[head * head_dim + still, constant] = bonus
    share = code_size // num_kv_heads  # of the code, carried by each KV head
    gain = 4.0  # what was read stands out from the token's own code
    for head in range(num_kv_heads):
        k_proj[head * head_dim + turning, flag] = -ramp
        k_proj[head * head_dim + still, flag] = bonus
        for i in range(share):
            v_proj[head * head_dim + i, head * share + i] = rms
            reader = head * (num_heads // num_kv_heads)  # the group's first query head
            o_proj[code_size + head * share + i, reader * head_dim + i] = gain

    tensors["model.norm.weight"] = torch.ones(decided["hidden_size"])
    amplitude = gain / math.sqrt((code_size * (1 + gain**2) + 2) / decided["hidden_size"])
    head_weight = tensors["lm_head.weight"].zero_()
    head_weight[is_tag, read] = codes[is_tag] * (
        MARGIN / (amplitude * _least_distance(codes[is_tag]))
    )
    return write_checkpoint(folder, decided, tensors)


def num_tags(vocab_size: int = VOCAB_SIZE) -> int:
    """How many ids of an FX-TAG model are tags: 0 to this number minus 1."""
    return vocab_size // 2


def fx_moe(folder: Path, num_experts: int = 8, *, seed: int = 0, **config: object) -> Path:
    """FX-MOE: a random Qwen3-MoE of a dense layer and three MoE layers, top-2.

    With more than 64 experts the experts are narrow, so that the folder stays small.
    """
    return random_qwen3_moe(
        folder,
        seed,
        num_layers=4,
        num_experts=num_experts,
        expert_size=32 if num_experts <= 64 else 8,
        dense_layers=(0,),
        **config,
    )


def _silenced(tensors: Tensors) -> Tensors:
    """The same weights, with attention and MLP adding nothing to the residual stream."""
    for name, tensor in tensors.items():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            tensor.zero_()
    return tensors


def _codes(count: int, size: int, *, most_alike: float = 0.6, seed: int = 0) -> torch.Tensor:
    """Rows of +1 and -1, no two with a product above ``most_alike * size``."""
    generator = torch.Generator().manual_seed(seed)
    codes = torch.empty(0, size)
    while len(codes) < count:
        code = torch.randint(0, 2, (size,), generator=generator) * 2.0 - 1.0
        if not len(codes) or (codes @ code).max() <= most_alike * size:
            codes = torch.cat((codes, code[None]))
    return codes


def _least_distance(codes: torch.Tensor) -> float:
    """Least difference between a code's product with itself and with another."""
    products = codes @ codes.T
    products.fill_diagonal_(-math.inf)
    return codes.shape[1] - products.max().item()
