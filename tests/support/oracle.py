"""The test oracle: a no-cache generator over Hugging Face modules.

Owns what the right tokens, logprobs and expert ids are. It imports nothing of the package under
test: the rules it repeats are written out a second time in ``noise`` and ``sampling``.

Shape suffixes: T tokens, V vocabulary, L MoE layers, E experts, K experts of a token.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from transformers import AutoModelForCausalLM
from transformers.utils import logging

from tests.support.sampling import Draw, Rules, draw, log_softmax

NUM_MEMORISED = 8192


@dataclass(frozen=True)
class OracleGeneration:
    """What one request must produce, and how near each token was to another.

    Attributes:
        prompt_ids: the prompt.
        temperature: the request's; 0 is greedy.
        token_ids: the generated ids; a token that ends the generation is included.
        logprobs: of the generated ids, of the kind asked for.
        gaps: best minus second best perturbed score in the support, in logits / temperature;
            of logits for greedy.
        border_gaps: the least move of a truncation border that changes the token.
        router_gaps: the least difference of k-th and (k+1)-th router logit over all MoE layers
            and all positions the token depends on; inf for dense models.
        finish: "stop" (a stop or end-of-sequence id) or "length".
        support_gaps: the least move of a truncation border that changes the support.
        reported: for each token, float64 ``[V]``, the logprobs of all ids, of the kind asked for.
        noise_scale: by how much the request's parameters can enlarge an error of a logit.
    """

    prompt_ids: tuple[int, ...]
    temperature: float
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[float, ...] = ()
    gaps: tuple[float, ...] = ()
    border_gaps: tuple[float, ...] = ()
    router_gaps: tuple[float, ...] = ()
    finish: str = "length"
    support_gaps: tuple[float, ...] = ()
    reported: tuple[np.ndarray, ...] = ()
    noise_scale: float | None = None


class Routing(NamedTuple):
    """The experts of each token in each MoE layer.

    Attributes:
        expert_ids: int64 ``[T, L, K]``, highest router logit first, ties to the lower id.
        gaps: float32 ``[T, L]``, K-th minus (K+1)-th router logit: how sure the *set* is.
        order_gaps: float32 ``[T, L]``, least difference of neighbours among the best K: how sure
            the *order* is.
    """

    expert_ids: np.ndarray
    gaps: np.ndarray
    order_gaps: np.ndarray


class Oracle:
    """Generates and scores without a cache; remembers every forward and every generation.

    Not for several threads. Share one instance (a session fixture) to profit from its memory.
    """

    def __init__(
        self,
        folder: Path | str,
        dtype: torch.dtype = torch.float32,
        attention: str = "sdpa",
        experts: str | None = None,
    ):
        logging.disable_progress_bar()
        how = {} if experts is None else {"experts_implementation": experts}
        self.model = AutoModelForCausalLM.from_pretrained(
            folder, dtype=dtype, attn_implementation=attention, **how
        ).eval()
        config = self.model.config.get_text_config()
        self.vocab_size: int = config.vocab_size
        self.experts_per_token: int = getattr(config, "num_experts_per_tok", 0) or 0
        self._prepared: dict[tuple[int, ...], tuple[np.ndarray, np.ndarray | None]] = {}
        self._last = lru_cache(NUM_MEMORISED)(self._last_uncached)
        self._generate = lru_cache(NUM_MEMORISED)(self._generate_uncached)

    def generate(
        self,
        prompt_ids: Sequence[int],
        *,
        max_new_tokens: int,
        stop_token_ids: Sequence[int] = (),
        eos_ids: Sequence[int] = (),
        logit_bias: Mapping[int, float] | None = None,
        **fields: float | int | str,
    ) -> OracleGeneration:
        """Generate by the documented rules, one whole forward for each token.

        Stop ids come from the caller alone: nothing is read from ``generation_config.json``.

        Args:
            prompt_ids: the prompt.
            max_new_tokens: most tokens to generate.
            stop_token_ids, eos_ids: ids that end it, and that ``min_new_tokens`` holds back.
            logit_bias: id -> what is added to its logit.
            fields: other fields of ``sampling.Rules``.
        """
        return self._generate(
            tuple(prompt_ids),
            max_new_tokens,
            frozenset((*stop_token_ids, *eos_ids)),
            biases=tuple((logit_bias or {}).items()),
            **fields,
        )

    def follow(
        self,
        prompt_ids: Sequence[int],
        output_ids: Sequence[int],
        *,
        stop_token_ids: Sequence[int] = (),
        eos_ids: Sequence[int] = (),
        logit_bias: Mapping[int, float] | None = None,
        **fields: float | int | str,
    ) -> OracleGeneration:
        """Draw each token after the *given* ones before it, by one forward over all.

        ``token_ids[i]`` is what follows ``prompt_ids + output_ids[:i]``: the same tokens as
        ``generate`` gives as long as ``output_ids`` are right, at a fraction of its price, and
        still a check of every token after one that was a tie. Arguments as in ``generate``.
        """
        stop_ids = frozenset((*stop_token_ids, *eos_ids))
        rules = Rules(logit_bias=dict(logit_bias or {}), held_ids=stop_ids, **fields)  # type: ignore[arg-type]
        prompt, output = tuple(prompt_ids), tuple(output_ids)
        if not output:
            return _generation(prompt, rules, [], [], "length")
        ids = prompt + output
        logits_tv, router_tle = self._forward(ids, num_logits=len(output) + 1)
        router_gaps = self._least_router_gaps(router_tle, len(ids))[len(prompt) - 1 : -1]
        draws = [
            draw(
                logits_tv[i],
                position=len(prompt) + i,
                prompt_ids=prompt,
                output_ids=output[:i],
                rules=rules,
            )
            for i in range(len(output))
        ]
        finish = "stop" if output[-1] in stop_ids else "length"
        return _generation(prompt, rules, draws, router_gaps.tolist(), finish)

    def prepare(
        self, sequences: Iterable[Sequence[int]], *, device: str = "cpu", at_once: int = 64
    ) -> None:
        """Forward many sequences together, padded on the right, for questions about them.

        ``score``, ``follow`` and ``router_ids`` of exactly these ids then cost no forward. What was
        prepared before is forgotten.
        """
        self.model.to(device)
        self._prepared.clear()
        longest_first = sorted({tuple(ids) for ids in sequences}, key=len, reverse=True)
        for start in range(0, len(longest_first), at_once):
            batch = longest_first[start : start + at_once]
            padded = [ids + (0,) * (len(batch[0]) - len(ids)) for ids in batch]
            forwarded = self._forward_all(torch.tensor(padded, device=device), num_logits=0)
            self._prepared |= {
                ids: (logits[: len(ids)], None if router is None else router[: len(ids)])
                for ids, logits, router in zip(batch, *forwarded, strict=True)
            }

    def prompt_logprobs(
        self, prompt_ids: Sequence[int], *, temperature: float = 1.0, kind: str = "scaled"
    ) -> np.ndarray:
        """Return the logprobs of all ids at prompt positions 1 on, float64 ``[prompt_len - 1, V]``.

        No penalty and no bias applies to a prompt; ``scaled`` is at the request's temperature.
        """
        logits_tv, _ = self._forward(tuple(prompt_ids), num_logits=len(prompt_ids))
        divisor = np.float32(temperature or 1.0) if kind == "scaled" else np.float32(1)
        return log_softmax(logits_tv[:-1] / divisor)

    def score(
        self, prompt_ids: Sequence[int], output_ids: Sequence[int], temperature: float = 1.0
    ) -> np.ndarray:
        """Return the logprob of each output token, float64 ``[len(output_ids)]``, by one forward.

        The same meaning as ``OracleGeneration.logprobs``. A prompt's own logprobs are
        ``score(prompt_ids[:1], prompt_ids[1:])``.
        """
        if not len(output_ids):
            return np.zeros(0)
        logits_tv, _ = self._forward((*prompt_ids, *output_ids), num_logits=len(output_ids) + 1)
        logprobs_tv = log_softmax(logits_tv[:-1] / np.float32(temperature or 1.0))
        return logprobs_tv[np.arange(len(output_ids)), list(output_ids)]

    def router_ids(self, ids: Sequence[int]) -> Routing:
        """Return the experts each position's token used as input, by one forward over ``ids``."""
        _, router_tle = self._forward(tuple(ids), num_logits=1)
        if router_tle is None:
            raise ValueError("the model has no MoE layers")
        k = self.experts_per_token
        order_tle = np.argsort(-router_tle, axis=-1, kind="stable")
        best = np.take_along_axis(router_tle, order_tle[..., : k + 1], axis=-1)
        steps = best[..., :-1] - best[..., 1:]
        gaps = steps[..., k - 1] if steps.shape[-1] == k else np.full(steps.shape[:-1], np.inf)
        return Routing(order_tle[..., :k], gaps, steps[..., : k - 1].min(axis=-1, initial=np.inf))

    def router_weights(self, ids: Sequence[int], expert_ids: np.ndarray) -> np.ndarray:
        """Return what the outputs of these experts ``[T, L, K]`` are weighted with, float64."""
        _, router_tle = self._forward(tuple(ids), num_logits=1)
        if router_tle is None:
            raise ValueError("the model has no MoE layers")
        chosen_tlk = np.take_along_axis(log_softmax(router_tle), expert_ids.astype(int), axis=-1)
        weights_tlk = np.exp(chosen_tlk)
        if self.model.config.get_text_config().norm_topk_prob:
            weights_tlk /= weights_tlk.sum(axis=-1, keepdims=True)
        return weights_tlk

    def last_logits(self, ids: Sequence[int]) -> np.ndarray:
        """Return the logits of the token after ``ids``, float32 ``[V]``; do not write to it."""
        return self._last(tuple(ids))[0]

    def _generate_uncached(
        self,
        prompt_ids: tuple[int, ...],
        max_new_tokens: int,
        stop_ids: frozenset[int],
        *,
        biases: tuple[tuple[int, float], ...],
        **fields,
    ) -> OracleGeneration:
        rules = Rules(logit_bias=dict(biases), held_ids=stop_ids, **fields)
        draws, router_gaps, ids, finish = [], [], prompt_ids, "length"
        while len(draws) < max_new_tokens and finish == "length":
            logits_v, router_gap = self._last(ids)
            output_ids = ids[len(prompt_ids) :]
            draws.append(
                draw(
                    logits_v,
                    position=len(ids),
                    prompt_ids=prompt_ids,
                    output_ids=output_ids,
                    rules=rules,
                )
            )
            router_gaps.append(router_gap)
            ids = (*ids, draws[-1].token_id)
            finish = "stop" if ids[-1] in stop_ids else "length"
        return _generation(prompt_ids, rules, draws, router_gaps, finish)

    def _last_uncached(self, ids: tuple[int, ...]) -> tuple[np.ndarray, float]:
        logits_tv, router_tle = self._forward(ids, num_logits=1)
        return logits_tv[0], float(self._least_router_gaps(router_tle, len(ids))[-1])

    def _least_router_gaps(self, router_tle: np.ndarray | None, num_tokens: int) -> np.ndarray:
        """Return, for each position, the least gap over all layers up to and with it ``[T]``."""
        k = self.experts_per_token
        if router_tle is None or router_tle.shape[-1] <= k:
            return np.full(num_tokens, math.inf)
        best = -np.partition(-router_tle, (k - 1, k), axis=-1)
        gaps = (best[..., k - 1] - best[..., k]).reshape(num_tokens, -1).min(axis=-1)
        return np.minimum.accumulate(gaps)

    def _forward(
        self, ids: tuple[int, ...], num_logits: int
    ) -> tuple[np.ndarray, np.ndarray | None]:
        """Return the last positions' logits ``[num_logits, V]`` and router logits ``[T, L, E]``."""
        if ids in self._prepared:
            logits_tv, router_tle = self._prepared[ids]
            return logits_tv[-num_logits:], router_tle
        ids_bt = torch.tensor([ids], device=self.model.device)
        (logits_tv,), (router_tle,) = self._forward_all(ids_bt, num_logits)
        return logits_tv, router_tle

    @torch.inference_mode()
    def _forward_all(
        self, ids_bt: torch.Tensor, num_logits: int
    ) -> tuple[list[np.ndarray], list[np.ndarray | None]]:
        """As ``_forward``, of several sequences of one length; 0 logits means all."""
        router = {"output_router_logits": True} if self.experts_per_token else {}
        output = self.model(ids_bt, use_cache=False, logits_to_keep=num_logits, **router)
        logits_btv = list(output.logits.float().cpu().numpy())
        if not router:
            return logits_btv, [None] * len(ids_bt)
        router_tle = torch.stack(output.router_logits, dim=1).float().cpu().numpy()
        return logits_btv, list(router_tle.reshape(*ids_bt.shape, *router_tle.shape[1:]))


def _generation(
    prompt_ids: tuple[int, ...],
    rules: Rules,
    draws: list[Draw],
    router_gaps: list[float],
    finish: str,
) -> OracleGeneration:
    return OracleGeneration(
        prompt_ids,
        rules.temperature,
        token_ids=tuple(d.token_id for d in draws),
        logprobs=tuple(d.logprob for d in draws),
        gaps=tuple(d.gap for d in draws),
        border_gaps=tuple(d.border_gap for d in draws),
        router_gaps=tuple(router_gaps),
        finish=finish,
        support_gaps=tuple(d.support_gap for d in draws),
        reported=tuple(d.reported for d in draws),
        noise_scale=rules.noise_scale,
    )
