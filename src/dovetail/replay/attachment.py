# pyright: strict
"""What hangs on a module while a context is open on it.

Owns that nobody keeps it: ``copy.deepcopy`` and pickle take along what a module holds, and the copy
would answer to that context for ever.
"""

from collections.abc import Callable
from typing import Any, NoReturn, SupportsIndex

from dovetail.replay.errors import ReplayError


class Attachment:
    """A hook, or what stands in the place of a ``forward``. No copy of its module can be made.

    Args:
        call: what it does until it is detached.
    """

    def __init__(self, call: Callable[..., Any]) -> None:
        self._call: Callable[..., Any] | None = call

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Do it.

        Raises:
            ReplayError: the context is closed; only a reference from its time leads here.
        """
        if self._call is None:
            raise ReplayError(
                "this forward was taken from the module, or the module copied, within a context "
                "that is closed; take it outside"
            )
        return self._call(*args, **kwargs)

    def detach(self) -> None:
        """Do nothing more; the context is closed."""
        self._call = None

    def __reduce_ex__(self, protocol: SupportsIndex) -> NoReturn:
        """Refuse to be copied or pickled, and so does every module that this hangs on."""
        raise ReplayError(
            "a model is copied or pickled while a context is open on it, and the copy would keep "
            "what answers its routers; do it before the context or after"
        )
