"""``/v1/models``, and the check of a body's ``model``."""

from typing import Any

from dovetail.server.errors import HttpError


def check_model(asked: str | None, served: str) -> None:
    """Refuse a request for another model than the served one.

    Raises:
        HttpError: it is another (404).
    """
    if asked is not None and asked != served:
        raise HttpError(
            404,
            f"the model {asked!r} does not exist; this server has {served!r}",
            param="model",
            code="model_not_found",
        )


def models_reply(served: str, *, context_len: int, created: int) -> dict[str, Any]:
    """Return the list of models: the one that is served."""
    return {
        "object": "list",
        "data": [
            {
                "id": served,
                "object": "model",
                "created": created,
                "owned_by": "dovetail",
                "root": served,
                "max_model_len": context_len,
            }
        ],
    }
