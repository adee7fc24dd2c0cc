"""Requests whose right answer is known: what the explorer asks, and what it must hear.

A quiz belongs to one fixture model. FX-COUNT shows a stale, lost, doubled or foreign token,
FX-TAG foreign or overwritten KV, FX-MOE anything that numbers can show.
"""

import math
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, Protocol

from tests.support.checkpoints import EOS_ID, VOCAB_SIZE
from tests.support.handmade import num_tags
from tests.support.oracle import Oracle, OracleGeneration, Routing

CONTEXT_LEN = 64
MAX_NEW_TOKENS = 20
MAX_PROMPT_LEN = CONTEXT_LEN - MAX_NEW_TOKENS

Ids = tuple[int, ...]


@dataclass(frozen=True)
class Question:
    """A prompt and how its answer is drawn; ``sampling`` are fields of ``SamplingParams``."""

    prompt: Ids
    sampling: dict[str, Any] = field(hash=False)


class Quiz(Protocol):
    """Questions to one model, and the answers.

    Attributes:
        columns: what the engine captures beside the tokens.
    """

    columns: tuple[str, ...]

    def questions(self, rng: random.Random, count: int) -> list[Question]:
        """Return questions, many of which share prefixes or go on from an earlier answer."""
        ...

    def answer(self, question: Question) -> OracleGeneration:
        """Return the right answer."""
        ...

    def routing(self, ids: Ids) -> Routing:
        """Return the experts of each token; for a quiz with that column."""
        ...


class HandmadeQuiz:
    """Questions to a model whose next token is a function of first and last token.

    Args:
        next_token: from (first, last) token to the next one.
        first_tokens: what a prompt may begin with.
        other_tokens: what it may go on with.
    """

    columns: tuple[str, ...] = ()

    def __init__(
        self, next_token: Callable[[int, int], int], first_tokens: range, other_tokens: range
    ) -> None:
        self._next_token = next_token
        self._first_tokens = first_tokens
        self._other_tokens = other_tokens

    def questions(self, rng: random.Random, count: int) -> list[Question]:
        """Return questions; see ``Quiz``."""
        stems = [self._fresh(rng, 26) for _ in range(2)]
        questions: list[Question] = []
        for _ in range(count):
            kind = rng.random()
            if kind < 0.45:
                stem = rng.choice(stems)
                prompt = stem[: rng.randint(1, len(stem))] + self._tokens(rng, rng.randint(0, 12))
            elif kind < 0.75 and questions:
                before = rng.choice(questions)
                prompt = before.prompt + self.answer(before).token_ids
                prompt += self._tokens(rng, rng.randint(0, 4))
            else:
                prompt = self._fresh(rng, rng.randint(1, 34))
            prompt = prompt[:MAX_PROMPT_LEN]
            questions.append(Question(prompt, self._sampling(rng, prompt)))
        return questions

    def answer(self, question: Question) -> OracleGeneration:
        """Return the answer that the model's rule gives."""
        sampling, first, last = question.sampling, question.prompt[0], question.prompt[-1]
        stops = {*sampling.get("stop_token_ids", ())}
        stops |= set() if sampling.get("ignore_eos") else {EOS_ID}
        ids: list[int] = []
        while len(ids) < sampling["max_new_tokens"] and not stops & {*ids[-1:]}:
            last = self._next_token(first, last)
            ids.append(last)
        sure = (math.inf,) * len(ids)
        return OracleGeneration(
            prompt_ids=question.prompt,
            temperature=sampling["temperature"],
            token_ids=tuple(ids),
            logprobs=(0.0,) * len(ids),
            gaps=sure,
            border_gaps=sure,
            router_gaps=sure,
            finish="stop" if stops & {*ids[-1:]} else "length",
        )

    def routing(self, ids: Ids) -> Routing:
        """A handmade model has no experts."""
        raise NotImplementedError

    def _fresh(self, rng: random.Random, length: int) -> Ids:
        return (rng.choice(self._first_tokens), *self._tokens(rng, length - 1))

    def _tokens(self, rng: random.Random, count: int) -> Ids:
        return tuple(rng.choices(self._other_tokens, k=count))

    def _sampling(self, rng: random.Random, prompt: Ids) -> dict[str, Any]:
        sampling = random_sampling(rng) | {"ignore_eos": rng.random() < 0.8}
        if rng.random() < 0.25:  # ends early, with the next step in flight
            token_id = prompt[-1]
            for _ in range(rng.choice((1, 1, 2, 5))):
                token_id = self._next_token(prompt[0], token_id)
            sampling["stop_token_ids"] = (token_id,)
        return sampling


class OracleQuiz:
    """A few fixed questions to a random model: the oracle remembers its answers."""

    columns: tuple[str, ...] = ("experts",)

    def __init__(self, oracle: Oracle) -> None:
        self._oracle = oracle
        self._routing = lru_cache(1024)(oracle.router_ids)
        rng = random.Random(0)
        stem = tuple(rng.choices(range(3, 250), k=24))
        prompts = [stem[:9], stem[:20], (*stem, 7, 8, 9), stem[:16], (11,), (5, 6) * 15]
        drawn = [{"temperature": 0.0}, {"temperature": 1.0}, {"temperature": 0.8, "top_k": 20}]
        self._questions = [
            Question(prompt, drawn[i % 3] | {"sampling_seed": 2**63 + i})
            for i, prompt in enumerate(prompts)
        ]
        for i in (0, 3, 5):  # the second turn of a conversation
            before = self._questions[i]
            answer = self.answer(Question(before.prompt, before.sampling | {"max_new_tokens": 10}))
            prompt = before.prompt + answer.token_ids + (3, 4)
            self._questions.append(Question(prompt, before.sampling))

    def questions(self, rng: random.Random, count: int) -> list[Question]:
        """Return questions; see ``Quiz``."""
        return [
            Question(
                question.prompt,
                question.sampling | {"max_new_tokens": rng.choice((0, 1, 4, 7, 10, 10, 10))},
            )
            for question in rng.choices(self._questions, k=count)
        ]

    def answer(self, question: Question) -> OracleGeneration:
        """Return the oracle's answer."""
        sampling = dict(question.sampling)
        return self._oracle.generate(
            question.prompt, seed=sampling.pop("sampling_seed"), eos_ids=(EOS_ID,), **sampling
        )

    def routing(self, ids: Ids) -> Routing:
        """Return the experts of each token."""
        return self._routing(ids)


def random_sampling(rng: random.Random) -> dict[str, Any]:
    """Return parameters of every kind that leave a handmade model's output as it is."""
    kinds: list[dict[str, Any]] = [
        {"temperature": 0.0},
        {"temperature": 1.0},
        {"temperature": 0.7, "top_k": 20},
        {"temperature": 1.0, "top_p": 0.9, "min_p": 0.05},
    ]
    return rng.choice(kinds) | {
        "max_new_tokens": rng.choice((0, 1, *range(4, MAX_NEW_TOKENS + 1))),
        "sampling_seed": rng.getrandbits(64),
    }


def count_quiz() -> Quiz:
    """Questions to FX-COUNT."""
    every = range(VOCAB_SIZE)
    return HandmadeQuiz(lambda first, last: (last + 1) % VOCAB_SIZE, every, every)


def tag_quiz() -> Quiz:
    """Questions to FX-TAG: the tag at position 0 is the answer, other tags may follow it."""
    tags = num_tags(VOCAB_SIZE)
    return HandmadeQuiz(lambda first, last: first, range(tags), range(tags // 2, VOCAB_SIZE))


def quiz_of(model: str, oracle: Callable[[], Oracle]) -> Quiz:
    """Return the quiz of a model by its name: "count", "tag" or "moe"."""
    makers = {"count": count_quiz, "tag": tag_quiz, "moe": lambda: OracleQuiz(oracle())}
    return makers[model]()
