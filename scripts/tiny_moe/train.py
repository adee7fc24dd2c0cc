#!/usr/bin/env python3
"""Train the embedded model from scratch and write it as a Hugging Face folder.

    python scripts/tiny_moe/train.py --data mix.txt --out FOLDER --seconds 100

The learning rate follows the clock, not a step count: it falls to its floor just
when the time is up, so a faster device simply sees more text. On one data-centre
GPU about 100 s (40 M tokens) are best; with more, this model learns the text by heart.
"""

import argparse
import math
import random
import time
from dataclasses import dataclass
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch.nn import functional
from transformers import PreTrainedTokenizerFast, Qwen3MoeConfig, Qwen3MoeForCausalLM

END_OF_TEXT, TURN_START, TURN_END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
SPECIAL_TOKENS = (END_OF_TEXT, TURN_START, TURN_END)  # ids 0, 1 and 2
VOCAB_SIZE = 2048
CHAT_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{m['role']}}\n{{m['content']}}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

WINDOW_LEN = 256  # tokens of one training window
PEAK_RATE = 3e-3
FLOOR_SHARE = 0.03  # of the peak rate, reached at the end
WARMUP_STEPS = 100
VALIDATION_SHARE = 50  # one document in this many is held out
NUM_REPORTS = 8


@dataclass(frozen=True)
class Corpus:
    """The text as token ids on the training device."""

    train: torch.Tensor  # [tokens]
    validation: torch.Tensor  # [tokens]
    chars_per_token: float


def train_tokenizer(documents: list[str]) -> Tokenizer:
    """Byte-level BPE; every digit is a token of its own, so that sums can be learnt."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    # Half of the documents give the same merges and take half the time.
    lines = (line for document in documents[::2] for line in document.split("\n"))
    tokenizer.train_from_iterator(lines, trainer)
    return tokenizer


def save_tokenizer(tokenizer: Tokenizer, folder: Path) -> None:
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=END_OF_TEXT,
        eos_token=TURN_END,
        pad_token=END_OF_TEXT,
    )
    wrapped.chat_template = CHAT_TEMPLATE
    wrapped.save_pretrained(folder)


def encode(documents: list[str], tokenizer: Tokenizer, device: str) -> Corpus:
    encoded = [[*item.ids, 0] for item in tokenizer.encode_batch(documents)]
    num_held_out = max(1, len(encoded) // VALIDATION_SHARE)
    num_chars = sum(len(document) + len(END_OF_TEXT) for document in documents)

    def flat(parts: list[list[int]]) -> torch.Tensor:
        return torch.tensor([token for part in parts for token in part], device=device)

    return Corpus(
        train=flat(encoded[num_held_out:]),
        validation=flat(encoded[:num_held_out]),
        chars_per_token=num_chars / sum(map(len, encoded)),
    )


def new_model(device: str) -> Qwen3MoeForCausalLM:
    """Five million parameters, two million of them used per token."""
    config = Qwen3MoeConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=192,
        intermediate_size=384,
        num_hidden_layers=6,
        num_attention_heads=6,
        num_key_value_heads=2,
        head_dim=32,  # pyright: ignore[reportCallIssue] - an attribute, not in the signature
        num_experts=8,
        num_experts_per_tok=2,
        moe_intermediate_size=144,
        norm_topk_prob=True,
        decoder_sparse_step=1,
        mlp_only_layers=[],
        router_aux_loss_coef=0.01,
        output_router_logits=True,  # adds the load-balancing loss
        max_position_embeddings=2048,
        tie_word_embeddings=True,
        bos_token_id=0,
        eos_token_id=2,
        pad_token_id=0,
    )
    return Qwen3MoeForCausalLM(config).to(device)  # pyright: ignore[reportArgumentType]


def new_optimizer(model: torch.nn.Module) -> torch.optim.AdamW:
    """Weight decay for matrices only; the rate is set before every step."""
    parameters = list(model.parameters())
    return torch.optim.AdamW(
        [
            {"params": [p for p in parameters if p.dim() >= 2], "weight_decay": 0.1},
            {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0},
        ],
        lr=PEAK_RATE,
        betas=(0.9, 0.95),
    )


def learning_rate(step: int, share_of_time: float) -> float:
    """Linear warm-up by steps times a cosine by the clock."""
    warmup = min(1.0, (step + 1) / WARMUP_STEPS)
    cosine = 0.5 * (1 + math.cos(math.pi * min(1.0, share_of_time)))
    return PEAK_RATE * warmup * (FLOOR_SHARE + (1 - FLOOR_SHARE) * cosine)


def windows(tokens: torch.Tensor, count: int, generator: torch.Generator) -> torch.Tensor:
    """Windows at random places: [count, WINDOW_LEN]."""
    starts = torch.randint(len(tokens) - WINDOW_LEN, (count,), generator=generator)
    steps = torch.arange(WINDOW_LEN, device=tokens.device)
    return tokens[starts.to(tokens.device)[:, None] + steps]


@torch.no_grad()
def validation_loss(
    model: Qwen3MoeForCausalLM, corpus: Corpus, *, batch: int, num_batches: int
) -> float:
    """Mean cross-entropy in nats per token, always over the same windows."""
    model.eval()
    generator = torch.Generator().manual_seed(5)
    total = 0.0
    for _ in range(num_batches):
        ids = windows(corpus.validation, batch, generator)
        with torch.autocast(ids.device.type, torch.bfloat16):
            logits = model(ids, output_router_logits=False).logits
        total += functional.cross_entropy(
            logits[:, :-1].float().flatten(0, 1), ids[:, 1:].flatten()
        ).item()
    model.train()
    return total / num_batches


def train(
    model: Qwen3MoeForCausalLM, corpus: Corpus, *, seconds: float, batch: int, seed: int
) -> None:
    optimizer = new_optimizer(model)
    generator = torch.Generator().manual_seed(seed)
    start = time.monotonic()
    step, next_report = 0, 0.0
    while (elapsed := time.monotonic() - start) < seconds:
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, elapsed / seconds)
        ids = windows(corpus.train, batch, generator)
        with torch.autocast(ids.device.type, torch.bfloat16):
            loss = model(ids, labels=ids).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        step += 1
        if elapsed >= next_report:
            next_report += seconds / NUM_REPORTS
            held_out = validation_loss(model, corpus, batch=batch, num_batches=4)
            report(f"{elapsed:4.0f} s", step * batch, held_out, corpus, train_loss=loss.item())
    final = validation_loss(model, corpus, batch=batch, num_batches=16)
    report("final", step * batch, final, corpus)


def report(
    label: str, num_windows: int, loss: float, corpus: Corpus, *, train_loss: float | None = None
) -> None:
    bits_per_char = loss / corpus.chars_per_token / math.log(2)
    parts = [label, f"{num_windows * WINDOW_LEN / 1e6:.1f} Mtok"]
    if train_loss is not None:
        parts.append(f"train {train_loss:.3f}")
    parts += [f"validation {loss:.3f} nats", f"{bits_per_char:.3f} bits/char"]
    print("  ".join(parts), flush=True)


@torch.no_grad()
def sum_accuracy(
    model: Qwen3MoeForCausalLM, tokenizer: Tokenizer, *, count: int = 200, seed: int = 9
) -> float:
    """Share of two-digit additions that greedy decoding gets right."""
    random_source = random.Random(seed)
    pairs = [(random_source.randint(10, 99), random_source.randint(10, 99)) for _ in range(count)]
    prompts = [
        f"{TURN_START}user\nWhat is {a} + {b}?{TURN_END}\n{TURN_START}assistant\n" for a, b in pairs
    ]
    # Two-digit numbers are two tokens each, so all prompts have one length.
    ids = torch.tensor([tokenizer.encode(prompt).ids for prompt in prompts], device=model.device)
    model.eval()
    for _ in range(5):
        ids = torch.cat([ids, model(ids).logits[:, -1:].argmax(-1)], dim=1)
    answers = [tokenizer.decode(row, skip_special_tokens=False) for row in ids.tolist()]
    right = sum(
        answer.split(f"{TURN_START}assistant\n")[-1].split(TURN_END)[0].strip() == str(a + b)
        for answer, (a, b) in zip(answers, pairs, strict=True)
    )
    return right / count


def save_model(model: Qwen3MoeForCausalLM, folder: Path) -> None:
    model.config.output_router_logits = False
    model.to(torch.bfloat16).save_pretrained(folder)  # pyright: ignore[reportArgumentType]
    for path in folder.iterdir():
        path.chmod(0o644)  # safetensors writes files that only their owner can read


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", type=Path, required=True, help="text made by make_data.py")
    parser.add_argument("--out", type=Path, required=True, help="folder to write")
    parser.add_argument("--seconds", type=float, default=100, help="training time (default 100)")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--batch", type=int, help="windows per step (128 on a GPU, 4 on a CPU)")
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


def main() -> None:
    args = parse_args()
    batch = args.batch or (4 if args.device == "cpu" else 128)
    torch.manual_seed(args.seed)
    torch.set_float32_matmul_precision("high")
    args.out.mkdir(parents=True, exist_ok=True)

    text = args.data.read_text(encoding="utf-8")
    documents = [document for document in text.split(END_OF_TEXT) if document]
    tokenizer = train_tokenizer(documents)
    save_tokenizer(tokenizer, args.out)
    corpus = encode(documents, tokenizer, args.device)
    print(
        f"{len(corpus.train) / 1e6:.2f} Mtok to learn, "
        f"{len(corpus.validation) / 1e6:.2f} Mtok held out, "
        f"{corpus.chars_per_token:.2f} characters per token"
    )

    model = new_model(args.device)
    print(f"{sum(p.numel() for p in model.parameters()) / 1e6:.2f} M parameters")
    train(model, corpus, seconds=args.seconds, batch=batch, seed=args.seed)
    print(f"two-digit additions right: {sum_accuracy(model, tokenizer):.1%}")
    save_model(model, args.out)
    print(f"wrote {args.out}")


if __name__ == "__main__":
    main()
