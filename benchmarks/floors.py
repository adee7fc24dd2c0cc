"""The least time that a work can take: bytes that must move, or products that must be made.

A reference, not a bound: it uses one device copy rate and one rate of bf16 products, both measured
on an H200; a step that only reads can come slightly under it. Each line of a benchmark has the
rates of its own machine beside it.
"""

from collections.abc import Sequence

from dovetail.config.model import ModelConfig

COPY_BYTES_PER_S = 4.26e12
"""Read and written, each counted."""
FLOP_PER_S = 790e12
BYTES = 2
"""Of a bf16 number."""


class Floor:
    """Floors of one model shape in bf16, in seconds.

    Args:
        model: the shape.
    """

    def __init__(self, model: ModelConfig) -> None:
        self._model = model
        width, heads = model.hidden_size, model.num_heads * model.head_dim
        kv_heads = model.num_kv_heads * model.head_dim
        self._attention = width * (heads + 2 * kv_heads) + heads * width
        self._head = model.vocab_size * width
        self.kv_bytes = 2 * model.num_layers * kv_heads * BYTES
        """Of one cached token, all layers."""

    def step(self, num_rows: int, context: float, *, distinct: float | None = None) -> float:
        """Return the floor of a decode step.

        Args:
            num_rows: each of one token.
            context: mean cached tokens of a row.
            distinct: experts of a layer that the step reads, on average; None for what even
                routing gives.
        """
        layers = self._model.num_layers
        weights = layers * (self._attention + self._mlp(num_rows, distinct)) + self._head
        flops = 2 * num_rows * (layers * (self._attention + self._active_mlp) + self._head)
        linear = max(weights * BYTES / COPY_BYTES_PER_S, flops / FLOP_PER_S)
        return linear + num_rows * context * self.kv_bytes / COPY_BYTES_PER_S

    def prefill(self, lens: Sequence[int]) -> float:
        """Return the floor of forwarding prompts whole; the head for their last tokens alone."""
        model = self._model
        linear = 2 * sum(lens) * model.num_layers * (self._attention + self._active_mlp)
        linear += 2 * len(lens) * self._head
        pairs = sum(n * n / 2 for n in lens)
        attention = 4 * pairs * model.num_heads * model.head_dim * model.num_layers
        return (linear + attention) / FLOP_PER_S

    def generate(self, prompt_lens: Sequence[int], output_lens: Sequence[int], rows: int) -> float:
        """Return the floor of whole requests, first come first served, at most ``rows`` at once.

        Prompts are forwarded in no steps of their own; each step has the rows that are left.
        """
        waiting = list(zip(prompt_lens, output_lens, strict=True))[::-1]
        running: list[list[int]] = []
        seconds = self.prefill(prompt_lens)
        while waiting or running:
            while waiting and len(running) < rows:
                prompt, output = waiting.pop()
                running.append([prompt, output - 1])  # its first token comes with the prompt
            running = [row for row in running if row[1] > 0]
            if running:
                context = sum(row[0] for row in running) / len(running)
                seconds += self.step(len(running), context)
            running = [[cached + 1, left - 1] for cached, left in running]
        return seconds

    def _mlp(self, num_rows: int, distinct: float | None) -> float:
        """Weights of a layer's MLP that a step reads."""
        model, moe = self._model, self._model.moe
        if moe is None:
            return 3 * model.hidden_size * model.intermediate_size
        if distinct is None:
            distinct = even_distinct(moe.num_experts, moe.num_experts_per_tok, num_rows)
        router = model.hidden_size * moe.num_experts
        return distinct * 3 * model.hidden_size * moe.intermediate_size + router

    @property
    def _active_mlp(self) -> float:
        """Weights of a layer's MLP that a token meets."""
        moe = self._model.moe
        return self._mlp(1, None if moe is None else moe.num_experts_per_tok)


def even_distinct(num_experts: int, top_k: int, num_rows: int) -> float:
    """Return how many experts some rows choose together on average, if all are as likely."""
    return num_experts * (1 - (1 - top_k / num_experts) ** num_rows)
