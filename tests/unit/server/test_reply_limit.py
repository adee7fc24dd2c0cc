"""Which replies list too many logprobs; everybody else's are not touched."""

import pytest

from dovetail.errors import RequestError
from dovetail.server.reply_limit import MAX_LISTED, check_listed
from dovetail.wire.request import LogprobParams, Request, SamplingParams


def request(num_prompt: int, num_new: int, n: int, **logprobs: object) -> Request:
    return Request(
        request_id=1,
        prompt_token_ids=tuple(range(num_prompt)),
        sampling=SamplingParams(max_new_tokens=num_new, n=n),
        logprobs=LogprobParams(**logprobs),
        seed=1,
    )


@pytest.mark.parametrize(
    ("requests", "num_listed"),
    [
        ([request(9, 2**18, 1024)], 0),  # chosen tokens have logprobs whatever their number
        ([request(9, 2**15, 8, top_logprobs_num=20)], 20 * 8 * 2**15),
        ([request(9, 2**16, 1, top_logprobs_num=64, token_ids_logprob=tuple(range(64)))], 2**23),
        ([request(9, 2**13, 8, top_logprobs_num=128)], 2**23),
        ([request(2**16, 0, 1, logprob_start_len=0, top_logprobs_num=128)], 2**23),
        ([request(2**16 + 5, 0, 1, logprob_start_len=5, top_logprobs_num=128)], 2**23),
        ([request(2**16 + 5, 0, 1, logprob_start_len=-1, top_logprobs_num=128)], 0),
        ([request(9, 2**10, 1, top_logprobs_num=64)] * 128, 2**23),
    ],
)
def test_all_that_is_listed_counts(requests: list[Request], num_listed: int) -> None:
    assert num_listed <= MAX_LISTED
    check_listed(requests)
    if num_listed == MAX_LISTED:
        with pytest.raises(RequestError, match="lists at most"):
            check_listed([*requests, request(9, 1, 1, top_logprobs_num=1)])
