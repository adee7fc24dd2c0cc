"""Is an engine's output what the oracle says of the same request? Every number of it."""

import numpy as np

from dovetail.wire.request import LogprobParams
from tests.support.compare import SCORE_NOISE, assert_follows, assert_logprobs, assert_top
from tests.support.oracle import Oracle, OracleGeneration
from tests.support.stepper import Output

PARAMS_OF_NO_DRAW = frozenset(
    {"sampling_seed", "n", "max_new_tokens", "ignore_eos", "stop", "skip_special_tokens"}
)


def check_output(
    output: Output,
    prompt: list[int],
    params: dict,
    oracle: Oracle,
    *,
    logprobs: LogprobParams | None = None,
    sample_index: int = 0,
    context: str = "",
) -> None:
    """Compare one output with what the oracle draws in the place of each of its tokens.

    An aborted one must be a beginning of the right answer. For requests without stop strings.
    """
    want = follow(oracle, prompt, output, params, logprobs=logprobs, sample_index=sample_index)
    got = output.token_ids
    assert_follows(got, want, context=context)
    check_logprobs(output, want, logprobs or LogprobParams(), context=context)
    check_prompt_scores(output, prompt, params, logprobs or LogprobParams(), oracle)
    if output.finish.type == "abort":
        return
    stops = {*params.get("stop_token_ids", ()), *oracle_eos(oracle)}
    if params.get("ignore_eos"):
        stops -= set(oracle_eos(oracle))
    assert not stops & set(got[:-1]), f"{context}: it went on after a stop"
    assert output.finish.type == want.finish or not got
    if want.finish == "length":
        assert len(got) == params["max_new_tokens"]
    else:
        assert len(got) > params.get("min_new_tokens", 0)


def follow(
    oracle: Oracle,
    prompt: list[int],
    output: Output,
    params: dict,
    *,
    logprobs: LogprobParams | None = None,
    sample_index: int = 0,
) -> OracleGeneration:
    """Ask the oracle what it draws after each beginning of an output."""
    return oracle.follow(
        prompt,
        output.token_ids,
        **{k: v for k, v in params.items() if k not in PARAMS_OF_NO_DRAW},
        seed=params.get("sampling_seed", 0),
        sample_index=sample_index,
        eos_ids=() if params.get("ignore_eos") else oracle_eos(oracle),
        kind=logprobs.kind if logprobs else "scaled",
    )


def check_logprobs(
    output: Output, want: OracleGeneration, asked: LogprobParams, *, context: str = ""
) -> None:
    """The chosen tokens' logprobs, the likeliest and the asked-for ones, of the kind asked for.

    Truncated ones are passed over where rounding may move the border.
    """
    tol = 1e-4 * (want.noise_scale or 1)
    sure = [
        asked.kind != "truncated" or gap > SCORE_NOISE * (want.noise_scale or 1)
        for gap in want.support_gaps
    ]
    at = [i for i, is_sure in enumerate(sure) if is_sure]
    chosen = [want.reported[i][output.token_ids[i]] for i in at]
    assert len(output.logprobs) == len(output.token_ids)
    assert_logprobs([output.logprobs[i] for i in at], chosen, tol, context=context)
    assert all(np.isfinite(output.logprobs)), context
    if asked.top_logprobs_num:
        assert len(output.top) == len(output.token_ids)
        for i in at:
            assert_top(*output.top[i], want.reported[i], num_top=asked.top_logprobs_num, tol=tol)
    else:
        assert not output.top
    ids = list(asked.token_ids_logprob)
    assert len(output.id_logprobs) == (len(output.token_ids) if ids else 0)
    for i in at if ids else ():
        assert_logprobs(output.id_logprobs[i], want.reported[i][ids], tol, context=context)


def check_prompt_scores(
    output: Output, prompt: list[int], params: dict, asked: LogprobParams, oracle: Oracle
) -> None:
    """Logprobs of prompt tokens from the start that was asked for: no penalties, no biases."""
    first = max(asked.logprob_start_len, 1)
    if asked.logprob_start_len < 0 or first >= len(prompt):
        assert output.prompt_scores is None
        return
    rows = oracle.prompt_logprobs(
        prompt, temperature=params.get("temperature", 1.0), kind=asked.kind
    )[first - 1 :]
    got = output.prompt_scores
    if output.finish.type == "abort":
        rows = rows[: len(got.logprobs) if got else 0]
        if got is None:
            return
    tol = 1e-4 / min(params.get("temperature") or 1.0, 1.0)
    known = prompt[first : first + len(rows)]
    wanted = [row[token] for row, token in zip(rows, known, strict=True)]
    assert_logprobs(got.logprobs, wanted, tol)
    if asked.top_logprobs_num:
        for ids, values, row in zip(got.top_ids, got.top_logprobs, rows, strict=True):
            assert_top(ids, values, row, num_top=asked.top_logprobs_num, tol=tol)
    else:
        assert not got.top_ids and not got.top_logprobs
    if asked.token_ids_logprob:
        for values, row in zip(got.id_logprobs, rows, strict=True):
            assert_logprobs(values, row[list(asked.token_ids_logprob)], tol)
    else:
        assert not got.id_logprobs


def oracle_eos(oracle: Oracle) -> tuple[int, ...]:
    """End-of-sequence ids as the checkpoint's generation config has them."""
    eos = oracle.model.generation_config.eos_token_id
    return () if eos is None else tuple(eos) if isinstance(eos, list) else (eos,)
