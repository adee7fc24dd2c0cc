"""A stepped engine over the scripted device, for tests of the scheduler alone. Imports no torch."""

from collections.abc import Callable

from tests.support.scripted import PagedFake, Tokens, plain_config
from tests.support.stepper import Stepper


def no_end(token_ids: Tokens) -> int:
    """A script that never draws an end-of-sequence id: tokens 3 to 31, by the tokens before."""
    return 3 + hash(tuple(token_ids)) % 29


def scripted_engine(*, script: Callable[[Tokens], int] = no_end, **config: object) -> Stepper:
    """Return a stepper with the options of ``plain_config``."""
    decided = plain_config(**config)  # type: ignore[arg-type]
    device = PagedFake(num_slots=decided.max_running, page_size=decided.page_size, script=script)
    return Stepper(decided, device, token_bytes=lambda _: b"")


def first_token_order(engine: Stepper, num_requests: int) -> list[int]:
    """Run to the end; return the request ids in the order of their first tokens."""
    order: list[int] = []

    def note(_: int) -> None:
        for request_id in range(num_requests):
            if request_id not in order and engine.outputs[request_id].token_ids:
                order.append(request_id)

    engine.on_step = note
    engine.run()
    return order
