# pyright: strict
"""A model's routers while they answer to somebody else.

Owns how each router's ``forward`` is wrapped, and is what it was afterwards; what counts as a
forward and what as a recomputation of a checkpointed part; and whether a backward is still to
come. Must not know whose choice it is.
"""

from collections.abc import Generator
from contextlib import ExitStack, contextmanager
from typing import Any, Protocol, cast

import torch
from torch import Tensor, nn

from dovetail.replay.attachment import Attachment
from dovetail.replay.errors import ReplayError
from dovetail.replay.routers import Router, Routers
from dovetail.replay.topk import Chooser, RouterCall, expect_one_selection


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


class Context(Protocol):
    """What a wrapped router calls."""

    calls: RouterCalls

    def chooser(self, place: int, router: Router, *, is_recomputing: bool) -> Chooser:
        """Return who chooses in this call of the router at ``place``."""
        ...


@contextmanager
def open_routers(found: Routers, context: Context) -> Generator[None]:
    """Wrap the routers of a model while open."""
    with ExitStack() as stack:
        with_grad = _WithGrad()
        # Each once: a trainer may call the model, or the layers by themselves.
        for module in dict.fromkeys(part for router in found.routers for part in router.around):
            enter = module.register_forward_pre_hook(Attachment(with_grad.enter), with_kwargs=True)
            stack.callback(enter.remove)
            leave = module.register_forward_hook(Attachment(with_grad.leave), always_call=True)
            stack.callback(leave.remove)
        for place, router in enumerate(found.routers):
            stack.enter_context(_wrapped(place, router, context, with_grad))
        yield


class _WithGrad:
    """Whether the model was called with gradients, seen from inside a checkpoint, which has none.

    A reentrant checkpoint runs its part of the forward without gradients and again in backward.
    It may be around the outermost module, too: then that is called without gradients on something
    that was computed with them.
    """

    def __init__(self) -> None:
        self.is_on = False
        self._depth = 0

    def enter(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self._depth == 0:
            given = (*args, *kwargs.values())
            # Not requires_grad, which a hook may set on embeddings in any forward.
            has_graph = any(isinstance(part, Tensor) and part.grad_fn is not None for part in given)
            self.is_on = torch.is_grad_enabled() or has_graph
        self._depth += 1

    def leave(self, module: nn.Module, args: object, output: object) -> None:
        self._depth -= 1
        if self._depth == 0:
            self.is_on = False


@contextmanager
def _wrapped(place: int, router: Router, context: Context, with_grad: _WithGrad) -> Generator[None]:
    module, calls = router.module, context.calls
    forward = module.forward
    if isinstance(forward, Attachment):
        raise ReplayError(f"another context is open on router {router.name}; close it first")

    def call_router(*args: Any, **kwargs: Any) -> Any:
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

    own = module.__dict__.get("forward")
    module.forward = attachment = Attachment(call_router)
    try:
        yield
    finally:
        attachment.detach()
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


def refuse_jitter(router: Router) -> None:
    """Raise ReplayError if noise is added to what the router sees, in training."""
    for module in (*router.around, router.module):
        noisy = [name for name in vars(module) if "jitter" in name and getattr(module, name)]
        if noisy and module.training:
            raise ReplayError(
                f"noise is added before router {router.name} in training ({noisy[0]} of its "
                f"{type(module).__name__} is not 0), so that the rollout's choice would meet other "
                "scores; set it to 0"
            )
