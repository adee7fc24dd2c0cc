#!/usr/bin/env python3
"""Train the toy model of the routing examples: two-digit addition, half learnt.

    python examples/r3_train_toy.py [--out FOLDER]       # about three minutes on one thread

2 experts of 64 in each of 10 layers: with so few of so many, a token that takes another expert is
another token altogether, so what routing does between rollout and trainer shows early. Training
stops long before the task is solved; the examples go on from there. The balance loss is of this
script alone: it keeps all experts in use, and no later step has it.

Weights are stored in float16: finer than bfloat16, so a rollout in bfloat16 rounds them.
"""

import argparse
import random
import time
from pathlib import Path

import torch
from rich.progress import Progress
from torch.nn import functional
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from r3 import arithmetic

BATCH = 48
RATE = 2e-3
SMOOTHING = 0.95  # of the loss that decides when to stop
WARMUP_STEPS = 50


def new_model() -> Qwen3MoeForCausalLM:
    """Four million parameters; a token uses a twelfth of them."""
    config = Qwen3MoeConfig(
        vocab_size=arithmetic.VOCAB_SIZE,
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=10,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,  # pyright: ignore[reportCallIssue] - an attribute, not in the signature
        num_experts=64,
        num_experts_per_tok=2,
        moe_intermediate_size=32,
        norm_topk_prob=True,
        decoder_sparse_step=1,
        mlp_only_layers=[],
        router_aux_loss_coef=0.01,
        output_router_logits=True,  # adds the balance loss
        max_position_embeddings=64,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=arithmetic.END_ID,
        pad_token_id=arithmetic.PAD_ID,
    )
    return Qwen3MoeForCausalLM(config)


def batch(source: random.Random) -> tuple[torch.Tensor, torch.Tensor]:
    """Return token ids [BATCH, prompt + answer], and labels: -100 in the prompts."""
    pairs = [arithmetic.problem(number) for number in arithmetic.problems(BATCH, source)]
    ids = torch.tensor([prompt + answer for prompt, answer in pairs])
    labels = ids.clone()
    labels[:, : arithmetic.PROMPT_LEN] = -100
    return ids, labels


def train(model: Qwen3MoeForCausalLM, *, stop_loss: float, max_steps: int, seed: int) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, betas=(0.9, 0.95), weight_decay=0.01)
    source, smooth, start = random.Random(seed), 0.0, time.monotonic()
    unbiased = float("inf")
    model.train()
    with Progress(transient=True) as progress:
        task = progress.add_task("training", total=max_steps)
        for step in range(1, max_steps + 1):
            for group in optimizer.param_groups:
                group["lr"] = RATE * min(1.0, step / WARMUP_STEPS)
            ids, labels = batch(source)
            output = model(ids, labels=labels)
            output.loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            task_loss = functional.cross_entropy(
                output.logits.detach()[:, arithmetic.PROMPT_LEN - 1 : -1].flatten(0, 1),
                ids[:, arithmetic.PROMPT_LEN :].flatten(),
            ).item()
            smooth = SMOOTHING * smooth + (1 - SMOOTHING) * task_loss
            unbiased = smooth / (1 - SMOOTHING**step)
            progress.update(task, completed=step, description=f"training, loss {unbiased:.3f}")
            if step % 50 == 0:
                print(
                    f"step {step}  loss {unbiased:.3f}  {time.monotonic() - start:.0f} s",
                    flush=True,
                )
            if step > WARMUP_STEPS and unbiased < stop_loss:
                print(f"step {step}  loss {unbiased:.3f}: this will do")
                return
    raise SystemExit(f"the loss is {unbiased:.3f} after {max_steps} steps, not below {stop_loss}")


@torch.no_grad()
def accuracy(model: Qwen3MoeForCausalLM, *, count: int = 500, seed: int = 9) -> float:
    """Share of additions that sampling at temperature 1 gets right."""
    model.eval()
    pairs = [
        arithmetic.problem(number) for number in arithmetic.problems(count, random.Random(seed))
    ]
    ids = torch.tensor([prompt for prompt, _ in pairs])
    generator = torch.Generator().manual_seed(seed)
    for _ in range(arithmetic.ANSWER_LEN):
        probabilities = model(ids).logits[:, -1].softmax(-1)
        ids = torch.cat([ids, torch.multinomial(probabilities, 1, generator=generator)], dim=1)
    answers = torch.tensor([answer for _, answer in pairs])
    return (ids[:, arithmetic.PROMPT_LEN :] == answers).all(-1).float().mean().item()


def save(model: Qwen3MoeForCausalLM, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    model.config.output_router_logits = False
    model.to(torch.float16).save_pretrained(folder)  # pyright: ignore[reportArgumentType]
    arithmetic.save_tokenizer(folder)
    for path in folder.iterdir():
        path.chmod(0o644)  # safetensors writes files that only their owner can read


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "r3" / "toy-moe")
    parser.add_argument("--stop-loss", type=float, default=0.5, help="nats per answer token (0.5)")
    parser.add_argument("--max-steps", type=int, default=3000)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    torch.set_num_threads(1)  # more threads wait for each other longer than they compute
    torch.manual_seed(args.seed)
    model = new_model()
    print(f"{sum(parameter.numel() for parameter in model.parameters()) / 1e6:.2f} M parameters")
    train(model, stop_loss=args.stop_loss, max_steps=args.max_steps, seed=args.seed)
    print(f"right at temperature 1: {accuracy(model):.1%}")
    save(model, args.out)
    print(f"wrote {args.out}")


if __name__ == "__main__":
    main()
