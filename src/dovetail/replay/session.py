# pyright: strict
"""Recording and replaying the routing of a Hugging Face model (R3, arXiv 2510.11370).

Owns the two contexts in which a model's routers answer to somebody else. Nothing is global: the
state is the session's, each router's ``forward`` is wrapped while a context is open and is what it
was when it closes, exceptions included.

A context encloses forward *and* backward of one micro-batch. Under activation checkpointing the
backward runs routers again; if they chose for themselves then, gradients would be those of another
function, silently so where the checkpoint is reentrant. So a context that ends with a backward
still to come raises.

Shape legend: N tokens, L routers, K experts of a token.
"""

from collections.abc import Callable, Generator
from contextlib import ExitStack, contextmanager
from typing import Any, Protocol, cast

import torch
from torch import Tensor, nn

from dovetail.replay.errors import ReplayError
from dovetail.replay.live import LiveRouting, margin_of, overlap_of
from dovetail.replay.packing import RouteBatch, route_dtype
from dovetail.replay.routers import Router, Routers, find_routers
from dovetail.replay.topk import Chooser, RouterCall, TopK, expect_one_selection

_MARK = "_dovetail_is_open"


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
        ReplayError: see ``find_routers``.
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
        with _open_routers(self._found, recording):
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
            ReplayError: routes are of another model; a router gets another number of tokens; on
                leaving, if a router did not run, or a backward is still to come.
        """
        self._expect_fitting(routes)
        replay = Replay(self, routes)
        with _open_routers(self._found, replay):
            yield replay
        replay.expect_whole()

    def _expect_fitting(self, routes: RouteBatch) -> None:
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
            _refuse_jitter(router)


# -- what both contexts count ----------------------------------------------------------------


class RouterCalls:
    """How often each router ran, and which backwards are still to come.

    Attributes:
        num_forwards: calls of each router in forwards.
        num_recomputes: in backwards, of parts that are checkpointed.
        num_owed: calls in a forward with gradients that no backward has passed yet.
    """

    def __init__(self, num_routers: int) -> None:
        self.num_forwards = [0] * num_routers
        self.num_recomputes = [0] * num_routers
        self.num_owed = [0] * num_routers

    def expect_whole(self, routers: tuple[Router, ...]) -> None:
        """Raise ReplayError unless all routers ran equally often, at least once."""
        most = max(self.num_forwards)
        if most == 0:
            raise ReplayError("no forward of the session's model ran inside the context")
        silent = [
            router.name
            for router, count in zip(routers, self.num_forwards, strict=True)
            if count < most
        ]
        if silent:
            raise ReplayError(
                f"{len(silent)} of {len(routers)} routers did not run in each of the {most} "
                f"forwards, the first is {silent[0]}: something else chose its experts"
            )

    def expect_backward(self, routers: tuple[Router, ...]) -> None:
        """Raise ReplayError if a backward is still to come."""
        owing = [router.name for router, n in zip(routers, self.num_owed, strict=True) if n > 0]
        if owing:
            raise ReplayError(
                f"backward has not passed {len(owing)} of {len(routers)} routers, the first is "
                f"{owing[0]}: call backward() inside the context, because under checkpointing it "
                "runs the routers again; or, if none is wanted, the forward under torch.no_grad()"
            )


class _Context(Protocol):
    """What a wrapped router calls."""

    calls: RouterCalls

    def chooser(self, place: int, router: Router, *, is_recomputing: bool) -> Chooser:
        """Return who chooses in this call of the router at ``place``."""
        ...


@contextmanager
def _open_routers(found: Routers, context: _Context) -> Generator[None]:
    """Wrap the routers of a model while open."""
    with ExitStack() as stack:
        with_grad = _WithGrad()
        for module in found.ancestors:
            stack.callback(module.register_forward_pre_hook(with_grad.enter).remove)
            leave = module.register_forward_hook(with_grad.leave, always_call=True)
            stack.callback(leave.remove)
        for place, router in enumerate(found.routers):
            stack.enter_context(_wrapped(place, router, context, with_grad))
        yield


class _WithGrad:
    """Whether the model was called with gradients, seen from inside a checkpoint, which has none.

    A reentrant checkpoint runs its part of the forward without gradients and again in backward.
    """

    def __init__(self) -> None:
        self.is_on = False
        self._depth = 0

    def enter(self, module: nn.Module, args: object) -> None:
        if self._depth == 0:
            self.is_on = torch.is_grad_enabled()
        self._depth += 1

    def leave(self, module: nn.Module, args: object, output: object) -> None:
        self._depth -= 1
        if self._depth == 0:
            self.is_on = False


@contextmanager
def _wrapped(
    place: int, router: Router, context: _Context, with_grad: _WithGrad
) -> Generator[None]:
    module, calls = router.module, context.calls
    forward = module.forward
    if hasattr(forward, _MARK):
        raise ReplayError(f"another context is open on router {router.name}; close it first")

    def wrapper(*args: Any, **kwargs: Any) -> Any:
        # Autograd runs a checkpointed part again while it works on a graph.
        is_recomputing = torch._C._current_graph_task_id() != -1  # pyright: ignore
        counts = calls.num_recomputes if is_recomputing else calls.num_forwards
        counts[place] += 1  # now: a recomputation may end within the router, once it has enough
        chooser = context.chooser(place, router, is_recomputing=is_recomputing)
        with RouterCall(router.selection, chooser) as call:
            output = forward(*args, **kwargs)
        expect_one_selection(call, router.name)
        is_checkpointed = with_grad.is_on and not torch.is_grad_enabled()
        _await_backward(output, calls, place, is_owed=not is_recomputing, always=is_checkpointed)
        return output

    setattr(wrapper, _MARK, True)
    own = module.__dict__.get("forward")
    module.forward = wrapper
    try:
        yield
    finally:
        if own is None:
            del module.forward
        else:
            module.forward = own


def _await_backward(
    output: Any, calls: RouterCalls, place: int, *, is_owed: bool, always: bool
) -> None:
    """Count a backward as owed until it passes one of the router's outputs."""
    outputs = cast(tuple[Any, ...], output if isinstance(output, tuple) else (output,))
    passed = [False]

    def on_grad(grad: Tensor) -> None:
        if not passed[0]:
            passed[0] = True
            calls.num_owed[place] -= 1

    hooked = [part for part in outputs if isinstance(part, Tensor) and part.requires_grad]
    if is_owed and (hooked or always):
        calls.num_owed[place] += 1
    for part in hooked:
        part.register_hook(on_grad)  # pyright: ignore[reportUnknownMemberType]


def _refuse_jitter(router: Router) -> None:
    for module in (*router.around, router.module):
        noisy = [name for name in vars(module) if "jitter" in name and getattr(module, name)]
        if noisy and module.training:
            raise ReplayError(
                f"noise is added before router {router.name} in training ({noisy[0]} of its "
                f"{type(module).__name__} is not 0), so that the rollout's choice would meet other "
                "scores; set it to 0"
            )


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
        self._ids_LNK = routes.ids_NLK.transpose(0, 1).contiguous()
        self._observed: list[tuple[Tensor, Tensor] | None] = [None] * len(session.routers)

    def chooser(self, place: int, router: Router, *, is_recomputing: bool) -> Chooser:
        """Return a chooser that installs the rows of the router at ``place``."""

        def observe(overlap_N: Tensor, margin_N: Tensor) -> None:
            if not is_recomputing:
                self._observed[place] = (overlap_N, margin_N)

        return _Installer(router, self._ids_LNK[place], self.routes.has_row_N, observe)

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
        device = seen[0][0].device
        return LiveRouting(
            torch.stack([overlap.to(device) for overlap, _ in seen], dim=1),
            torch.stack([margin.to(device) for _, margin in seen], dim=1),
            self.routes.has_row_N.to(device),
            self._session.num_experts_per_tok,
            self.routes.num_missing,
        )


class _Installer:
    """Answers a router with the rows of the rollout, and looks at what it would have done."""

    def __init__(
        self,
        router: Router,
        ids_NK: Tensor,
        has_row_N: Tensor,
        observe: Callable[[Tensor, Tensor], None],
    ) -> None:
        self._router = router
        self._ids_NK = ids_NK
        self._has_row_N = has_row_N
        self._observe = observe

    def groups(self, num_tokens: int, num_groups: int, live_NQ: Tensor) -> Tensor:
        per_group = self._router.selection.num_experts // num_groups
        # Where nothing is replayed these are the live groups once more.
        repeats = -(-self._ids_NK.shape[1] // live_NQ.shape[1])
        live = live_NQ.repeat(1, repeats)[:, : self._ids_NK.shape[1]]
        groups = self._installed(live * per_group) // per_group
        return torch.cat([groups, live_NQ], dim=1)

    def experts(self, scores_NE: Tensor, live: TopK, ranked_NE: Tensor) -> TopK:
        indices = self._installed(live.indices)
        with torch.no_grad():
            overlap = overlap_of(indices, live.indices)
            self._observe(overlap, margin_of(ranked_NE, live.indices))
        return TopK(scores_NE.gather(1, indices), indices)

    def _installed(self, live_NK: Tensor) -> Tensor:
        """Return the rollout's ids, int64, and the live ones of tokens without a row."""
        num_tokens, num_rows = len(live_NK), len(self._ids_NK)
        if num_tokens != num_rows:
            raise ReplayError(
                f"router {self._router.name} was given {num_tokens} tokens, the routes have "
                f"{num_rows}: send the index through what the input_ids go through"
            )
        device = live_NK.device
        forced, has_row = self._ids_NK.to(device), self._has_row_N.to(device)
        return torch.where(has_row[:, None], forced.long(), live_NK)
