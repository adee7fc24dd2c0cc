"""The checkpoints do in Hugging Face what they are said to do, in generation with a cache."""

import json

import pytest
import torch
from transformers import AutoTokenizer

from tests.support.checkpoints import EOS_ID, VOCAB_SIZE, random_llama
from tests.support.compare import assert_same_tokens
from tests.support.handmade import MARGIN, fx_count, num_tags
from tests.support.oracle import Oracle

FILLER = num_tags()


def generated(oracle: Oracle, prompt: list[int], max_new_tokens: int) -> list[int]:
    ids = oracle.model.generate(
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
        do_sample=False,
        max_new_tokens=max_new_tokens,
        eos_token_id=None,
        pad_token_id=0,
    )
    return ids[0, len(prompt) :].tolist()


def test_fx_count_counts_on(fx_count_oracle):
    for prompt in ([0], [200], [5, 300, 17], [9, 9, 9, 318]):
        expected = [(prompt[-1] + 1 + i) % VOCAB_SIZE for i in range(40)]
        assert generated(fx_count_oracle, prompt, 40) == expected


def test_fx_count_margin_of_every_token(fx_count_oracle):
    logits = fx_count_oracle.model(torch.arange(VOCAB_SIZE)[None]).logits[0]
    best, ids = logits.topk(2, dim=-1)
    assert ids[:, 0].tolist() == [*range(1, VOCAB_SIZE), 0]
    margins = best[:, 0] - best[:, 1]
    assert margins.min().item() == pytest.approx(MARGIN, rel=1e-3)
    assert margins.max() < 1.6 * MARGIN


def test_fx_count_survives_sampling(fx_count_oracle):
    want = fx_count_oracle.generate([3], max_new_tokens=40, temperature=1, seed=1)
    assert want.token_ids == tuple(range(4, 44))


def test_fx_count_of_a_large_vocabulary(tmp_path):
    oracle = Oracle(fx_count(tmp_path, vocab_size=2048))
    want = oracle.generate([2040], max_new_tokens=16, temperature=0)
    assert want.token_ids == (*range(2041, 2048), *range(9))
    assert min(want.gaps) > 0.99 * MARGIN


def test_fx_tag_repeats_its_tag_for_500_tokens(fx_tag_oracle):
    prompt = [42, *(FILLER + i for i in range(100))]
    assert generated(fx_tag_oracle, prompt, 500) == [42] * 500


def test_fx_tag_has_a_healthy_margin(fx_tag_oracle):
    for tag in range(0, num_tags(), 3):
        want = fx_tag_oracle.generate(
            [tag, FILLER, FILLER + tag % 90], max_new_tokens=1, temperature=0
        )
        assert want.token_ids == (tag,)
        assert want.gaps[0] > 0.9 * MARGIN


@pytest.mark.parametrize(
    "prompt",
    [[7], [7, 8], [7, 8, 9, 10], [7, *range(FILLER, FILLER + 30), 8], [FILLER, FILLER, 7, 8]],
    ids=["alone", "two", "four", "far", "after fillers"],
)
def test_fx_tag_takes_the_earliest_tag(fx_tag_oracle, prompt):
    assert generated(fx_tag_oracle, prompt, 30) == [7] * 30


def test_fx_tag_reads_position_0_at_every_step(fx_tag_folder):
    oracle = Oracle(fx_tag_folder, attention="eager")
    ids = [42, *(FILLER + i for i in range(30)), *[42] * 400]
    attention = oracle.model(torch.tensor([ids]), output_attentions=True).attentions[-1]
    assert (attention[0, :, :, 0] > 0.99).all()


def test_fx_tag_loses_a_tag_whose_kv_is_replaced(fx_tag_oracle):
    """The KV of another request at position 0 gives that request's tag."""
    model = fx_tag_oracle.model
    prompts = torch.tensor([[tag, *range(FILLER, FILLER + 20)] for tag in (11, 12)])
    caches = [model(prompt[None], use_cache=True).past_key_values for prompt in prompts]
    for mine, other in zip(*(cache.layers for cache in caches), strict=True):
        mine.keys[:, :, 0], mine.values[:, :, 0] = other.keys[:, :, 0], other.values[:, :, 0]
    logits = model(torch.tensor([[11]]), past_key_values=caches[0]).logits
    assert logits[0, -1].argmax() == 12


def test_fx_tag_in_bfloat16(fx_tag_folder):
    oracle = Oracle(fx_tag_folder, dtype=torch.bfloat16)
    assert generated(oracle, [42, *(FILLER + i for i in range(40))], 100) == [42] * 100


@pytest.mark.parametrize(("name", "num_experts"), [("fx_moe", 8), ("fx_moe_wide", 272)])
def test_fx_moe_has_three_moe_layers(request, name, num_experts):
    folder = request.getfixturevalue(f"{name}_folder")
    oracle = request.getfixturevalue(f"{name}_oracle")
    config = json.loads((folder / "config.json").read_text())
    assert (config["num_experts"], config["mlp_only_layers"]) == (num_experts, [0])
    routing = oracle.router_ids(range(VOCAB_SIZE))
    assert routing.expert_ids.shape == (VOCAB_SIZE, 3, 2)
    assert len(set(routing.expert_ids.flatten().tolist())) > 0.8 * num_experts
    assert routing.expert_ids.max() >= num_experts - 2
    want = oracle.generate([1, 2, 3], max_new_tokens=20, temperature=0)
    assert_same_tokens(generated(oracle, [1, 2, 3], 20), want)
    assert len(set(want.token_ids)) > 10


def test_one_seed_gives_one_checkpoint(tmp_path):
    weights = [
        (random_llama(tmp_path / name, seed) / "model.safetensors").read_bytes()
        for name, seed in (("a", 0), ("b", 0), ("c", 1))
    ]
    assert weights[0] == weights[1] != weights[2]


def test_tokenizer_is_bytes_and_specials(llama_folder):
    tokenizer = AutoTokenizer.from_pretrained(llama_folder)
    text = "Zwölf Boxkämpfer \n\t\x00 日本語 🙂"
    assert tokenizer.encode(text) == list(text.encode())
    assert tokenizer.decode(list(text.encode())) == text
    assert tokenizer.encode("a<|endoftext|>b") == [97, EOS_ID, 98]
    assert tokenizer.eos_token_id == EOS_ID
    assert len(tokenizer) == VOCAB_SIZE
    assert tokenizer.decode([300, 65]) == "<300>A"
    assert tokenizer.decode([65, EOS_ID, 66], skip_special_tokens=True) == "AB"


def test_chat_template(llama_folder):
    tokenizer = AutoTokenizer.from_pretrained(llama_folder)
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": "Hi"}], tokenize=False, add_generation_prompt=True
    )
    assert text == "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"


def test_eos_id_is_the_callers(tmp_path):
    for eos_id in (None, 0, EOS_ID + 2):
        folder = random_llama(tmp_path / str(eos_id), eos_id=eos_id)
        for name in ("config.json", "generation_config.json"):
            assert json.loads((folder / name).read_text())["eos_token_id"] == eos_id
        assert AutoTokenizer.from_pretrained(folder).eos_token_id == eos_id


def test_tiny_moe_of_the_package(tiny_moe_oracle):
    want = tiny_moe_oracle.generate([1, 2, 3], max_new_tokens=4, temperature=0)
    assert len(want.token_ids) == 4
