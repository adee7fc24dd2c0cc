# pyright: strict
"""Recording and replaying the routing of a Hugging Face model (R3, arXiv 2510.11370).

Owns the two contexts in which a model's routers answer to somebody else, and whose choice that is.
Nothing is global: the state is the session's, and when a context closes the model is what it was.

A context encloses forward *and* backward of one micro-batch. Under activation checkpointing the
backward runs routers again; if they chose for themselves then, gradients would be those of another
function, silently so where the checkpoint is reentrant. So a context that ends with a backward
still to come raises.

Shape legend: N tokens, L routers, K experts of a token.
"""

from collections.abc import Callable, Generator
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from dovetail.replay.attachment import Attachment
from dovetail.replay.errors import ReplayError
from dovetail.replay.interception import RouterCalls, open_routers, refuse_jitter
from dovetail.replay.live import LiveRouting, margin_of, overlap_of
from dovetail.replay.packing import RouteBatch, expect_batch, route_dtype
from dovetail.replay.routers import Router, Routers, find_routers
from dovetail.replay.topk import Chooser, TopK


class ReplaySession:
    """The routers of one model, ready to record and to replay.

    Finds them by one small forward (see ``routers.find_routers``). Keeps a reference to the model
    and no other state; one context at a time may be open on a model. For each process of a sharded
    trainer make one session, on the module that its wrapper holds.

    Args:
        model: a Hugging Face model with experts, before ``torch.compile``.
        probe: runs one small forward, for models that cannot be called with ``input_ids`` alone.

    Attributes:
        routers: tuple of ``Router``, in the order of the forward.

    Raises:
        ReplayError: the model is no module; or see ``find_routers``.
    """

    def __init__(self, model: nn.Module, *, probe: Callable[[], object] | None = None) -> None:
        self._found: Routers = find_routers(model, probe)
        self.routers: tuple[Router, ...] = self._found.routers

    @property
    def layer_ids(self) -> tuple[int, ...]:
        """Decoder index of each router's layer, as in ``RouteTrace.layer_ids``."""
        return self._found.layer_ids

    @property
    def num_experts(self) -> int:
        """Experts that a router selects from."""
        return self.routers[0].selection.num_experts

    @property
    def num_experts_per_tok(self) -> int:
        """Experts that a router selects (K)."""
        return self.routers[0].selection.num_selected

    @contextmanager
    def record(self) -> Generator["Recording"]:
        """Keep what the model's routers select, of all forwards within.

        Raises:
            ReplayError: on leaving, if a router did not run; or another context is open.
        """
        recording = Recording(self)
        with open_routers(self._found, recording):
            yield recording
        recording.expect_whole()

    @contextmanager
    def replay(self, routes: RouteBatch) -> Generator["Replay"]:
        """Let the model's routers select ``routes``. Forward and backward belong inside.

        A forward that no backward follows must run under ``torch.no_grad()``. Several forwards of
        the same tokens may run inside.

        Args:
            routes: of the micro-batch, in the order in which the model flattens it.

        Raises:
            ReplayError: routes are of another model; a router gets another number of tokens; a
                forward is of other tokens than the first; on leaving, if a router did not run, or
                a backward is still to come.
        """
        self._expect_fitting(routes)
        replay = Replay(self, routes)
        with open_routers(self._found, replay), _same_tokens(self._found.ancestors):
            yield replay
        replay.expect_whole()

    def _expect_fitting(self, routes: RouteBatch) -> None:
        expect_batch(routes)
        have, asked = self.layer_ids, routes.layer_ids
        missing, surplus = sorted(set(have) - set(asked)), sorted(set(asked) - set(have))
        if missing:
            raise ReplayError(f"the routes have no rows for the layers {missing} of the model")
        if surplus:
            raise ReplayError(f"the routes have the layers {surplus}, which select no experts here")
        for name in ("num_experts", "num_experts_per_tok"):
            mine, theirs = getattr(self, name), getattr(routes, name)
            if mine != theirs:
                raise ReplayError(f"{name} is {mine}, the routes' {theirs}: another model's rows")
        for router in self.routers:
            refuse_jitter(router)


# -- recording -----------------------------------------------------------------------------------


class Recording:
    """What routers selected; see ``ReplaySession.record``."""

    def __init__(self, session: ReplaySession) -> None:
        self.calls = RouterCalls(len(session.routers))
        self._session = session
        self._rows: list[list[Tensor]] = [[] for _ in session.routers]

    def chooser(self, place: int, router: Router, *, is_recomputing: bool) -> Chooser:
        """Return a chooser that leaves the choice and keeps it, but for a recomputation."""
        dtype = route_dtype(router.selection.num_experts)
        return _Recorder([] if is_recomputing else self._rows[place], dtype)

    def expect_whole(self) -> None:
        """Raise ReplayError if a router did not run."""
        self.calls.expect_whole(self._session.routers)

    @property
    def routes(self) -> RouteBatch:
        """The rows of all forwards, one after another, in the order the model flattened them."""
        self.expect_whole()
        ids_LNK = torch.stack([torch.cat(rows) for rows in self._rows])
        ids_NLK = ids_LNK.transpose(0, 1).contiguous()
        has_row = torch.ones(len(ids_NLK), dtype=torch.bool, device=ids_NLK.device)
        return RouteBatch(ids_NLK, has_row, self._session.layer_ids, self._session.num_experts)


class _Recorder:
    def __init__(self, rows: list[Tensor], dtype: torch.dtype) -> None:
        self._rows = rows
        self._dtype = dtype

    def groups(self, num_tokens: int, num_groups: int, live_NQ: Tensor) -> Tensor:
        return live_NQ

    def experts(self, scores_NE: Tensor, live: TopK, ranked_NE: Tensor) -> TopK:
        self._rows.append(live.indices.to(self._dtype))
        return live


# -- replaying -----------------------------------------------------------------------------------


class Replay:
    """A replay under way; see ``ReplaySession.replay``."""

    def __init__(self, session: ReplaySession, routes: RouteBatch) -> None:
        self.calls = RouterCalls(len(session.routers))
        self.routes = routes
        self._session = session
        self._rows = _Rows(routes)
        self._observed: list[_Observed | None] = [None] * len(session.routers)

    def chooser(self, place: int, router: Router, *, is_recomputing: bool) -> Chooser:
        """Return a chooser that installs the rows of the router at ``place``."""

        def observe(live_NK: Tensor, ranked_NE: Tensor) -> None:
            if not is_recomputing:
                self._observed[place] = _Observed(live_NK, margin_of(ranked_NE, live_NK))

        return _Installer(router, place, self._rows, observe)

    def expect_whole(self) -> None:
        """Raise ReplayError if a router did not run, or a backward is still to come."""
        self.calls.expect_whole(self._session.routers)
        self.calls.expect_backward(self._session.routers)

    def report(self) -> LiveRouting:
        """Return what the live routers would have chosen in the last forward.

        Raises:
            ReplayError: there was none.
        """
        seen = [observed for observed in self._observed if observed is not None]
        if len(seen) < len(self._observed):
            raise ReplayError("no forward of the session's model has run inside the context")
        device = seen[0].margin_N.device
        overlaps = [
            overlap_of(self._rows.installed(place, one.live_NK), one.live_NK)
            for place, one in enumerate(seen)
        ]
        return LiveRouting(
            torch.stack([overlap.to(device) for overlap in overlaps], dim=1),
            torch.stack([one.margin_N.to(device) for one in seen], dim=1),
            self.routes.has_row_N.to(device),
            self._session.num_experts_per_tok,
            self.routes.num_missing,
        )


@contextmanager
def _same_tokens(modules: tuple[nn.Module, ...]) -> Generator[None]:
    """Watch that all forwards of these modules are of the same tokens, while open.

    The number of tokens does not tell: each step of ``generate`` after a prompt of one token has as
    many as that.
    """
    with ExitStack() as stack:
        for module in modules:
            watch = Attachment(_FirstCall().compare)
            hook = module.register_forward_pre_hook(watch, with_kwargs=True)
            stack.callback(hook.remove)
        yield


class _FirstCall:
    """What a module was first called with: its token ids, and how many are cached before them."""

    def __init__(self) -> None:
        self._seen: tuple[Tensor | None, int] | None = None

    def compare(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Raise ReplayError if this call is of other tokens than the first one was."""
        ids: object = args[0] if args else kwargs.get("input_ids")
        if not isinstance(ids, Tensor) or ids.is_floating_point():
            ids = None  # the module takes embeddings
        num_cached = _num_cached(kwargs)
        if self._seen is None:
            self._seen = (None if ids is None else ids.clone(), num_cached)
            return
        first, first_cached = self._seen
        is_other = num_cached != first_cached
        if ids is not None and first is not None and ids.numel() == first.numel():
            is_other = is_other or not torch.equal(ids.flatten(), first.flatten())
        if is_other:
            raise ReplayError(
                f"this forward of {type(module).__name__} is of other tokens than the first one in "
                "the context, or of the same elsewhere (as the steps of generate() are), and a "
                "replay is of one set of tokens: open a context for each set, with its routes"
            )


def _num_cached(kwargs: dict[str, Any]) -> int:
    """Return how many tokens' keys a forward is given."""
    length = getattr(kwargs.get("past_key_values"), "get_seq_length", None)
    return 0 if length is None else int(length())


class _Observed(NamedTuple):
    """What a report needs of one router; compared when it is asked for, not in each step."""

    live_NK: Tensor
    margin_N: Tensor


class _Rows:
    """The rows of a micro-batch, layer by layer, on each device that a router is on."""

    def __init__(self, routes: RouteBatch) -> None:
        self.num_tokens = routes.num_tokens
        self._ids_LNK = routes.ids_NLK.transpose(0, 1).contiguous()
        self._has_row_N1 = routes.has_row_N[:, None]
        self._placed: dict[torch.device, tuple[Tensor, Tensor]] = {}

    def installed(self, place: int, live_NK: Tensor) -> Tensor:
        """Return the ids that the router at ``place`` uses: live ones where there is no row."""
        ids_LNK, has_row_N1 = self._on(live_NK.device)
        return torch.where(has_row_N1, ids_LNK[place].long(), live_NK)

    def _on(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """Return ids [L, N, K] and whether there are any [N, 1]; copied once a device."""
        if device not in self._placed:
            self._placed[device] = (self._ids_LNK.to(device), self._has_row_N1.to(device))
        return self._placed[device]


class _Installer:
    """Answers a router with the rows of the rollout, and looks at what it would have done."""

    def __init__(
        self, router: Router, place: int, rows: _Rows, observe: Callable[[Tensor, Tensor], None]
    ) -> None:
        self._router = router
        self._place = place
        self._rows = rows
        self._observe = observe

    def groups(self, num_tokens: int, num_groups: int, live_NQ: Tensor) -> Tensor:
        selection = self._router.selection
        per_group = selection.num_experts // num_groups
        # Where nothing is replayed these are the live groups once more.
        repeats = -(-selection.num_selected // live_NQ.shape[1])
        live = live_NQ.repeat(1, repeats)[:, : selection.num_selected]
        groups = self._installed(live * per_group) // per_group
        return torch.cat([groups, live_NQ], dim=1)

    def experts(self, scores_NE: Tensor, live: TopK, ranked_NE: Tensor) -> TopK:
        indices = self._installed(live.indices)
        with torch.no_grad():
            self._observe(live.indices, ranked_NE)
        return TopK(scores_NE.gather(1, indices), indices)

    def _installed(self, live_NK: Tensor) -> Tensor:
        """Return the rollout's ids, int64, and the live ones of tokens without a row."""
        num_tokens, num_rows = len(live_NK), self._rows.num_tokens
        if num_tokens != num_rows:
            raise ReplayError(
                f"router {self._router.name} was given {num_tokens} tokens, the routes have "
                f"{num_rows}: send the index through what the input_ids go through, and open a "
                "context for each set of tokens (the steps of generate() are many)"
            )
        return self._rows.installed(self._place, live_NK)
