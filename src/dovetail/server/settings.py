"""What a user may configure about the HTTP side. The engine's own options are ``config``'s."""

import msgspec

DEFAULT_PORT = 30000


class ServerSettings(msgspec.Struct, frozen=True, kw_only=True):
    """The options of the HTTP side. Every one has a working default.

    Attributes:
        model_name: what ``/v1/models`` lists and what a request's ``model`` must be.
        version: of this package, as ``/server_info`` gives it.
        api_key: what clients must send as a bearer token; None lets everybody in.
        max_body_bytes: longest request body that is read.
        keep_alive_s: how long an idle connection stays open. Longer than a rollout client's pause
            between two steps, or its pooled connections break at every step.
        body_s: how long a request's body may take to arrive.
        drain_s: how long an ending server waits for its last answers to be read.
    """

    model_name: str
    version: str
    api_key: str | None = None
    max_body_bytes: int = 64 * 2**20
    keep_alive_s: int = 600
    body_s: float = 60
    drain_s: float = 1.5
