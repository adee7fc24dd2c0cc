# pyright: strict
"""Routes into the ``RouterReplay`` of Megatron-Core, without importing it.

Owns the way from a ``RouteBatch`` to the objects that Megatron makes with
``moe_enable_routing_replay``: which layer's rows go to which router, in what dtype, when they
count for a forward and when for a recomputation, and that nothing is left for the next batch.

Megatron keeps all such objects of a process in one list, in the order of construction, and hands
rows to recomputations from a queue. Here routers are those of the model that is given, by their
``layer_number``; each call of a router is counted; and what a call is, a forward or a
recomputation, is asked of autograd when it happens. So other models of the process, layers
elsewhere in the pipeline, forwards without a backward, and schedules that interleave forwards and
backwards cannot shift rows. The queue itself stays: backwards of a chunk must come in the order of
its forwards, which all of Megatron's schedules keep.

Shape legend: N tokens of this rank, in the order of its hidden states; K experts of a token.
"""

from collections.abc import Generator, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol, cast

import torch
from torch import Tensor, nn

from dovetail.replay.attachment import Attachment
from dovetail.replay.errors import ReplayError
from dovetail.replay.packing import RouteBatch, expect_batch

_MTP = "mtp"  # the part of a module's path that says multi-token prediction


class RouterReplay(Protocol):
    """What this module calls of ``megatron.core.transformer.moe.router_replay.RouterReplay``."""

    replay_backward_list: list[Tensor]

    def set_target_indices(self, topk_indices: Tensor) -> None:
        """Use these ids, int64 [N, K], in forwards; and once in a recomputation."""
        ...

    def set_router_replay_action(self, router_replay_action: Any) -> None:
        """Say what the next calls do."""
        ...

    def clear_router_replay_action(self) -> None:
        """Route natively."""
        ...

    def clear_indices(self) -> None:
        """Forget all ids."""
        ...


class Actions(Protocol):
    """The members of ``RouterReplayAction`` that are used."""

    @property
    def REPLAY_FORWARD(self) -> Any:
        """Select the target ids."""
        ...

    @property
    def REPLAY_BACKWARD(self) -> Any:
        """Select the ids at the head of the queue."""
        ...


@dataclass(slots=True)
class _Router:
    """A router of this rank.

    Attributes:
        layer_id: decoder index of its layer over the whole model, from 0.
        num_forwards: calls in the open micro-batch.
        num_queued: forwards with gradients of the step.
        num_recomputes: recomputations of the step.
    """

    name: str
    module: nn.Module
    replay: RouterReplay
    layer_id: int
    num_forwards: int = 0
    num_queued: int = 0
    num_recomputes: int = 0


@dataclass(slots=True)
class _Open:
    """The micro-batch whose forward is running."""

    routes: RouteBatch
    routers: list[_Router] = field(default_factory=list[_Router])


class MegatronReplay:
    """The routers of one rank's model, ready to replay.

    Invariant: outside of ``step`` every router routes natively and holds no ids.

    Args:
        model: the rank's model, or its chunks under interleaved pipeline parallelism; wrapped or
            not.
        actions: ``megatron.core.transformer.moe.router_replay.RouterReplayAction``.

    Raises:
        ReplayError: there are no routers, replay is not enabled in them, or ``moe_router_fusion``
            is on, which returns before it would be asked.
    """

    def __init__(self, model: nn.Module | Sequence[nn.Module], actions: Actions) -> None:
        chunks = [model] if isinstance(model, nn.Module) else list(model)
        self._actions = actions
        self._routers = [router for chunk in chunks for router in _routers_of(chunk)]
        self._open: _Open | None = None
        self._is_stepping = False
        if not self._routers:
            raise ReplayError(
                "no router has a router_replay: is the model dense, or this a stage without "
                "mixture-of-experts layers?"
            )

    @property
    def layer_ids(self) -> tuple[int, ...]:
        """Decoder indices, from 0, of this rank's routers; those of MTP layers are left out."""
        return tuple(router.layer_id for router in self._routers)

    @contextmanager
    def step(self) -> Generator[None]:
        """Enclose the forwards and backwards of one global batch.

        Raises:
            ReplayError: on leaving, if a router's recomputations are fewer than its forwards but
                not none, so that rows of some micro-batch were used for another.
        """
        if self._is_stepping:
            raise ReplayError("a step is open; close it first")
        self._is_stepping = True
        try:
            with ExitStack() as stack:
                for router in self._routers:
                    router.num_queued = router.num_recomputes = 0
                    router.replay.clear_indices()
                    ask = Attachment(_asking(self, router))
                    hook = router.module.register_forward_pre_hook(ask, with_kwargs=True)
                    stack.callback(hook.remove)
                yield
            self._expect_recomputed()
        finally:
            self._is_stepping = False
            self._open = None
            for router in self._routers:
                router.replay.clear_router_replay_action()
                router.replay.clear_indices()

    @contextmanager
    def forward(self, routes: RouteBatch, chunk: nn.Module | None = None) -> Generator[None]:
        """Enclose the forward of one micro-batch through one chunk of the model.

        Args:
            routes: of this rank's tokens, in the order of its hidden states: for Megatron's
                ``[sequence, batch]`` those of the transposed index, after the slices of context
                and sequence parallelism.
            chunk: the model chunk that runs; None where the rank has one.

        Raises:
            ReplayError: there is no open step, rows are missing, the routes lack one of this
                rank's layers; a router gets another number of tokens, or does not run once.
        """
        if not self._is_stepping or self._open is not None:
            raise ReplayError("a forward belongs inside step(), and one at a time")
        mine = set(cast(Iterable[nn.Module], chunk.modules())) if chunk is not None else None
        routers = [one for one in self._routers if mine is None or one.module in mine]
        self._set_targets(routers, routes)
        self._open = _Open(routes, routers)
        try:
            yield
        finally:
            self._open = None
        wrong = [router for router in routers if router.num_forwards != 1]
        if wrong:
            raise ReplayError(
                f"router {wrong[0].name} ran {wrong[0].num_forwards} times in the forward of a "
                "micro-batch, not once"
            )
        for router in routers:
            if torch.is_grad_enabled():
                router.num_queued += 1
            else:  # no backward will ask for what set_target_indices has queued
                router.replay.replay_backward_list.pop()

    def _set_targets(self, routers: list[_Router], routes: RouteBatch) -> None:
        expect_batch(routes)
        if routes.num_missing:
            raise ReplayError(
                f"{routes.num_missing} tokens have no row, and Megatron cannot route them live"
            )
        places = {layer_id: place for place, layer_id in enumerate(routes.layer_ids)}
        missing = [one.layer_id for one in routers if one.layer_id not in places]
        if missing:
            raise ReplayError(f"the routes have no rows for the layers {missing} of this rank")
        ids_NLK = filled(routes)
        for router in routers:
            router.num_forwards = 0
            router.replay.set_target_indices(ids_NLK[:, places[router.layer_id]].contiguous())

    def _ask(self, router: _Router, num_tokens: int) -> None:
        """Say what the call of a router that begins now is to select."""
        if torch._C._current_graph_task_id() != -1:  # pyright: ignore
            router.num_recomputes += 1
            queued = router.replay.replay_backward_list
            self._expect_tokens(router, num_tokens, len(queued[0]) if queued else 0)
            router.replay.set_router_replay_action(self._actions.REPLAY_BACKWARD)
            return
        if self._open is None or not any(one is router for one in self._open.routers):
            raise ReplayError(
                f"router {router.name} runs inside step() but outside of forward(), so that "
                "nobody says which rows are its tokens'"
            )
        self._expect_tokens(router, num_tokens, self._open.routes.num_tokens)
        router.num_forwards += 1
        router.replay.set_router_replay_action(self._actions.REPLAY_FORWARD)

    @staticmethod
    def _expect_tokens(router: _Router, num_tokens: int, num_rows: int) -> None:
        if num_tokens != num_rows:
            raise ReplayError(
                f"router {router.name} was given {num_tokens} tokens, the routes have {num_rows}: "
                "send the index through the slices that the hidden states go through"
            )

    def _expect_recomputed(self) -> None:
        for router in self._routers:
            left = len(router.replay.replay_backward_list)
            if router.num_recomputes not in (0, router.num_queued) or (
                left != router.num_queued - router.num_recomputes
            ):
                raise ReplayError(
                    f"router {router.name} ran {router.num_queued} forwards and "
                    f"{router.num_recomputes} recomputations, and {left} rows are left: a backward "
                    "is missing, or rows went to another micro-batch"
                )


def filled(routes: RouteBatch) -> Tensor:
    """Return int64 [N, L, K] with distinct legal ids in rows that have none.

    Fillers are dispatched like any other token. They go round all experts, because equal rows
    would be one expert's burden, and repeated ids within a row collapse in a map of experts.
    """
    ids = routes.ids_NLK.long()
    is_filler = ~routes.has_row_N
    ordinal = is_filler.long().cumsum(0) - 1
    k = routes.num_experts_per_tok
    slots = torch.arange(k, device=ids.device)
    rows_NK = (ordinal[:, None] * k + slots) % routes.num_experts
    return torch.where(is_filler[:, None, None], rows_NK[:, None, :], ids)


def _routers_of(chunk: nn.Module) -> Iterator[_Router]:
    for name, module in cast(Iterable[tuple[str, nn.Module]], chunk.named_modules()):
        if not hasattr(module, "router_replay") or _MTP in name.split("."):
            continue
        number = getattr(module, "layer_number", None)
        config = getattr(module, "config", None)
        if getattr(config, "moe_router_fusion", False):
            raise ReplayError(
                f"moe_router_fusion is on in {name}; a fused router does not ask for rows: turn "
                "it off"
            )
        replay = cast("RouterReplay | None", module.router_replay)
        if replay is None:
            raise ReplayError(
                f"{name} has no RouterReplay: build the model with moe_enable_routing_replay=True"
            )
        if not isinstance(number, int):
            raise ReplayError(f"{name} has layer_number {number}, so its layer is not known")
        yield _Router(name, module, replay, number - 1)


def _asking(owner: MegatronReplay, router: _Router) -> Any:
    def ask(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        hidden = next(iter((*args, *kwargs.values())))
        num_tokens = hidden.numel() // hidden.shape[-1]
        owner._ask(router, num_tokens)  # pyright: ignore[reportPrivateUsage]

    return ask
