"""Are the captured experts of an output those of an independent forward? Row by row, and by name.

One whole forward of the oracle over prompt and output says what each row must be. Rows where router
logits are nearer than rounding are passed over, and counted.
"""

from collections import Counter
from collections.abc import Mapping

import numpy as np

from tests.support.compare import ROUTER_NOISE, assert_same_routes
from tests.support.oracle import Oracle, Routing
from tests.support.stepper import Output


def num_forwarded(prompt_len: int, num_tokens: int) -> int:
    """All tokens but the last one that was sampled: it never was an input."""
    return prompt_len + max(num_tokens - 1, 0)


def check_routes(
    output: Output,
    prompt: list[int],
    oracle: Oracle,
    *,
    start: int = 0,
    borders: Mapping[str, int] | None = None,
    seen: Counter[str] | None = None,
    context: str = "",
) -> None:
    """Compare all rows of ``experts``, and by name those on both sides of each border.

    Args:
        output: with the column ``experts``; ``expert_weights`` is compared, too, if it is there.
        prompt: of the request.
        oracle: of the model.
        start: position of the first row that was asked for.
        borders: name -> every so many positions there is such a border.
        seen: counts rows, rows passed over, and rows looked at by name.
    """
    finish, got = output.finish, output.captured["experts"]
    assert finish is not None and finish.type != "error", f"{context}: {finish}"
    end = num_forwarded(len(prompt), len(output.token_ids))
    if finish.type == "abort" and not output.token_ids:
        end = max(start, min(end, start + len(got)))
    assert len(got) == max(end - start, 0), f"{context}: rows"
    assert output.starts["experts"] == start
    if not len(got):
        return
    want = oracle.router_ids([*prompt, *output.token_ids][:end])
    want = Routing(*(part[start:] for part in want))
    assert_same_routes(got, want, context=context)
    assert (np.diff(np.sort(got, axis=-1)) > 0).all(), f"{context}: an expert twice in a row"
    seen = Counter() if seen is None else seen
    if "expert_weights" in output.captured:
        assert output.starts["expert_weights"] == start
        weights, ids = output.captured["expert_weights"], [*prompt, *output.token_ids][:end]
        before = np.zeros((start, *got.shape[1:]), got.dtype)
        want_weights = oracle.router_weights(ids, np.concatenate([before, got]))[start:]
        np.testing.assert_allclose(
            weights, want_weights, rtol=0, atol=ROUTER_NOISE, err_msg=f"{context}: weights"
        )
        seen["weights"] += weights.shape[0] * weights.shape[1]
    seen["rows"] += got.shape[0] * got.shape[1]
    seen["unsure"] += int((want.gaps < ROUTER_NOISE).sum())
    named = {"prompt end": [len(prompt)], "last row": [end]}
    named |= {name: range(step, end, step) for name, step in (borders or {}).items()}
    if output.usage and output.usage.cached_tokens:
        named["cache end"] = [output.usage.cached_tokens]
    named["seam"] = [span.start for span in output.spans["experts"][1:]]
    if start:  # of two turns
        named["seam"].append(start)
    for name, positions in named.items():
        rows = sorted({p - start for border in positions for p in (border - 1, border)})
        rows = [row for row in rows if 0 <= row < len(got)]
        at_border = Routing(*(part[rows] for part in want))
        assert_same_routes(got[rows], at_border, context=f"{context}: {name}")
        seen[name] += len(rows)
    check_spans(output, "experts", start, start + len(got))


def check_spans(output: Output, column: str, start: int, end: int) -> None:
    """Spans cover the rows without gaps, and count no more differing rows than they have."""
    spans = output.spans[column]
    borders = [start, *(span.end for span in spans)]
    assert borders == [*(span.start for span in spans), end]
    for span in spans:
        assert 0 <= span.num_differing <= span.end - span.start
        assert output.usage is not None and span.num_recomputed <= output.usage.num_retractions
