"""May a waiting sequence start?"""

from dovetail.config.schema import EngineConfig
from dovetail.sched.sequence import Sequence


def admission_len(sequence: Sequence, config: EngineConfig, *, num_running: int) -> int:
    """Return the tokens there must be room for before ``sequence`` starts.

    Its known tokens, and a page for each running sequence to grow by: a start that
    takes the last pages would be retracted in the very next step. With nothing else
    running its own tokens are enough.
    """
    return sequence.known_len + num_running * config.page_size
