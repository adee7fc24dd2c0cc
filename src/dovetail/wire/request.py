"""Requests as clients state them, and as the scheduler sees them.

Owns the shape of a request; ``wire.validate`` has the rules for a legal one. Must
not know how a request is scheduled or which device serves it.

Field names follow SGLang's native ``/generate`` dialect.
"""

from typing import Literal

import msgspec

from dovetail.wire.typed import FieldsByName


class SamplingParams(
    msgspec.Struct,
    metaclass=FieldsByName,
    frozen=True,
    kw_only=True,
    forbid_unknown_fields=True,
):
    """How tokens are drawn and when a generation ends.

    Attributes:
        max_new_tokens: most tokens to generate; None means 128, or less where
            the context ends earlier. An explicit value that cannot fit is refused.
        temperature: divides the logits; 0 is greedy decoding.
        top_k: keep the k most likely tokens; -1 keeps all.
        top_p: keep the smallest set of tokens whose probability reaches top_p.
        min_p: drop tokens less likely than min_p times the likeliest one.
        repetition_penalty: divides positive logits, and multiplies negative ones, of tokens that
            occur in prompt or output (CTRL, arXiv 1909.05858).
        frequency_penalty: subtracted from a token's logit for each time it was generated.
        presence_penalty: subtracted once if the token was generated at all.
        logit_bias: token id -> number added to its logit.
        min_new_tokens: ids that end (stop ids, and end-of-sequence without ``ignore_eos``) cannot
            be drawn before this many tokens.
        n: generations of the same prompt; they differ in the sample index of their noise.
        stop: strings that end the generation; matched over bytes, not tokens.
        stop_token_ids: token ids that end the generation.
        sampling_seed: 64-bit seed; None draws one from the operating system
            (the seed used is reported in the result).
        ignore_eos: go on past the model's end-of-sequence ids.
        skip_special_tokens: leave special tokens out of the text.
        no_stop_trim: keep the matched stop in the text.
    """

    max_new_tokens: int | None = None
    temperature: float = 1.0
    top_k: int = -1
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    logit_bias: dict[int, float] | None = None
    min_new_tokens: int = 0
    n: int = 1
    stop: str | tuple[str, ...] | None = None
    stop_token_ids: tuple[int, ...] | None = None
    sampling_seed: int | None = None
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    no_stop_trim: bool = False

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """The stop strings as a tuple, whichever way they were given."""
        if self.stop is None:
            return ()
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)


LogprobKind = Literal["scaled", "raw", "truncated"]


class LogprobParams(
    msgspec.Struct,
    metaclass=FieldsByName,
    frozen=True,
    kw_only=True,
    forbid_unknown_fields=True,
):
    """Which probabilities are reported beside the chosen tokens' own.

    Attributes:
        kind: what a logprob is the log-softmax of. ``scaled``: the logits as sampled from, after
            penalties and bias, divided by the temperature (1 for greedy), before truncation.
            ``raw``: the model's logits. ``truncated``: ``scaled`` over the support that truncation
            left, so ids outside it have none; not for prompt tokens.
        logprob_start_len: report prompt tokens from this position on; -1 reports none. The
            token at position 0 has no logprob.
        top_logprobs_num: report the likeliest ids of each position, this many.
        token_ids_logprob: report these ids at each position.
        sampling_mask: report the tokens that each draw could have drawn, at most 512 of them, and
            the chosen token's logprob among them.
    """

    kind: LogprobKind = "scaled"
    logprob_start_len: int = -1
    top_logprobs_num: int = 0
    token_ids_logprob: tuple[int, ...] = ()
    sampling_mask: bool = False


class CaptureParams(
    msgspec.Struct,
    metaclass=FieldsByName,
    frozen=True,
    kw_only=True,
    forbid_unknown_fields=True,
):
    """Which per-token columns are handed back.

    Attributes:
        columns: ``tokens``: the input token, int32. ``experts``: the ids that each MoE layer
            chose, in its own order, [MoE layers, k]. ``expert_weights``: their weights, float32
            of that shape. The engine must capture them; ``tokens`` it always does.
        start_len: position of the first row, at most the length of the prompt.
        interval: hand rows back while the generation runs, whenever there are so many; 0 hands
            back all of them with the last event.
    """

    columns: tuple[str, ...] = ()
    start_len: int = 0
    interval: int = 0


class Request(msgspec.Struct, frozen=True, kw_only=True):
    """One admitted request: every field decided, bounded and finite.

    Attributes:
        request_id: made by the engine; unique for its lifetime.
        prompt_token_ids: at least one id, each in ``[0, vocab_size)``.
        sampling: validated; ``max_new_tokens`` is a number here.
        seed: the 64-bit seed of this request's noise.
        namespace: opaque prefix-cache namespace (adapter, salt);
            prefixes are shared only inside one namespace.
        logprobs: see ``LogprobParams``; validated.
        group: label for aborting several requests together.
        priority: under the ``priority`` policy, higher goes first.
        capture: see ``CaptureParams``; validated.
        label: the client's own id, or None; never a key.
        is_streamed: tokens are news as they are committed; else there may be one event, the last.
    """

    request_id: int
    prompt_token_ids: tuple[int, ...]
    sampling: SamplingParams
    seed: int
    namespace: bytes = b""
    logprobs: LogprobParams = LogprobParams()
    group: str | None = None
    priority: int = 0
    capture: CaptureParams = CaptureParams()
    label: str | None = None
    is_streamed: bool = True

    @property
    def max_new_tokens(self) -> int:
        """The decided limit of generated tokens."""
        assert self.sampling.max_new_tokens is not None
        return self.sampling.max_new_tokens
