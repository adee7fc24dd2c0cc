"""The trainer's side: plain Hugging Face, one padded batch, and a replay around it.

What is here is what a loop of your own needs: an index of tokens that goes through the same padding
as the tokens, and from it the routes, the targets, and whatever else there is one of a token.
"""

import random
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.utils import logging

from dovetail.replay.layout import pad_right
from dovetail.replay.live import LiveRouting
from dovetail.replay.packing import RouteBatch, TokenTable
from dovetail.replay.session import ReplaySession
from r3 import arithmetic
from r3.rollout import Sample


def load_trainer(folder: Path, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """Load the model to train. Its dropout is 0, so training and evaluation compute alike."""
    logging.disable_progress_bar()
    return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation="eager")


class Batch:
    """Samples as a trainer sees them. Columns [B, C] belong to the token that is *predicted* there.

    Attributes:
        input_ids: tokens, padded at the right.
        targets: the token after each.
        counts: 1 where that token was sampled, 0 at prompts and pads.
        rollout: its logprob in the rollout.
        sequence: number of its sample.
        routes: the rollout's experts of each input token.
    """

    def __init__(self, samples: Sequence[Sample]) -> None:
        self.table = TokenTable([s.tokens for s in samples], [s.trace for s in samples])
        self.index = pad_right(self.table.indices())
        self.input_ids = self.table.tokens(self.index, fill=arithmetic.PAD_ID)
        following = self.table.next(self.index)
        self.targets = self.table.tokens(following)
        per_token = [torch.tensor([0.0] * len(s.prompt) + list(s.logprobs)) for s in samples]
        sampled = [torch.tensor([0.0] * len(s.prompt) + [1.0] * len(s.output)) for s in samples]
        self.rollout = self.table.column(per_token, following)
        self.counts = self.table.column(sampled, following)
        self.sequence = torch.arange(len(samples))[:, None].expand(self.index.shape)
        self.routes = self.table.routes(self.index, input_ids=self.input_ids)

    def logprobs(self, model: PreTrainedModel) -> torch.Tensor:
        """Return the trainer's logprobs of the targets, float32 [B, C]."""
        output = model(
            input_ids=self.input_ids, attention_mask=(self.index >= 0).long(), use_cache=False
        )
        logprobs = torch.log_softmax(output.logits.float(), dim=-1)
        return logprobs.gather(-1, self.targets[..., None])[..., 0]

    @torch.no_grad()
    def replayed(
        self, model: PreTrainedModel, session: ReplaySession, routes: RouteBatch | None = None
    ) -> tuple[torch.Tensor, LiveRouting]:
        """Return the logprobs through the rollout's experts, or others, and what was live."""
        with session.replay(self.routes if routes is None else routes) as replay:
            logprobs = self.logprobs(model)
        return logprobs, replay.report()


def in_batches(
    samples: Sequence[Sample], size: int, done: Callable[[int], None] = lambda _: None
) -> list[Batch]:
    """Divide samples into batches; ``done`` is told how many there are."""
    batches = [Batch(samples[at : at + size]) for at in range(0, len(samples), size)]
    done(len(batches))
    return batches


def chosen_problems(count: int, seed: int) -> list[int]:
    """Draw problems, all different."""
    return random.Random(seed).sample(range(arithmetic.NUM_PROBLEMS), count)
