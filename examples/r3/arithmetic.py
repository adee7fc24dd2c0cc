"""Two-digit addition, one token a character: ``47+85=`` -> ``231.``, the sum backwards.

The answer is always three digits and an end; backwards, so that each digit needs only what is
already there. Tiny models learn it in minutes and are still often wrong, which leaves reinforcement
learning something to do.
"""

import json
import random
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

CHARACTERS = "0123456789+=."
END_ID = CHARACTERS.index(".")
PAD, PAD_ID = "<pad>", len(CHARACTERS)
VOCAB_SIZE = len(CHARACTERS) + 1
PROMPT_LEN, ANSWER_LEN = 6, 4
NUM_PROBLEMS = 100 * 100


def encode(text: str) -> list[int]:
    return [CHARACTERS.index(character) for character in text]


def problem(number: int) -> tuple[list[int], list[int]]:
    """Return prompt and answer of one of the ``NUM_PROBLEMS`` problems."""
    first, second = divmod(number, 100)
    return encode(f"{first:02}+{second:02}="), encode(f"{first + second:03}"[::-1] + ".")


def problems(count: int, source: random.Random) -> list[int]:
    """Draw numbers of problems, with repetition."""
    return [source.randrange(NUM_PROBLEMS) for _ in range(count)]


def reward(output: list[int], answer: list[int]) -> float:
    """Half for the share of right tokens, half for being right altogether: 0 to 1."""
    right = sum(mine == theirs for mine, theirs in zip(output, answer, strict=False))
    return 0.5 * right / len(answer) + 0.5 * (output == answer)


def save_tokenizer(folder: Path) -> None:
    """Write a tokenizer of one token a character."""
    vocab = {character: number for number, character in enumerate(CHARACTERS)} | {PAD: PAD_ID}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(PAD, special=True)])
    tokenizer.save(str(folder / "tokenizer.json"))
    named = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": ".", "pad_token": PAD}
    (folder / "tokenizer_config.json").write_text(json.dumps(named, indent=1) + "\n")
