"""What Megatron-Core gives a replay: routers, their ``RouterReplay`` and its actions.

Written from the documented interface; small enough that a CPU and plain torch run it.
"""

from collections.abc import Callable
from enum import Enum
from types import SimpleNamespace

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

NUM_EXPERTS, K, WIDTH = 8, 2, 16
TopK = Callable[[Tensor, int, int | None, int | None], tuple[Tensor, Tensor]]


class Action(Enum):
    RECORD = "record"
    REPLAY_FORWARD = "replay_forward"
    REPLAY_BACKWARD = "replay_backward"


class FakeRouterReplay:
    """Selects what it was told to; a recomputation takes the head of a queue."""

    def __init__(self) -> None:
        self.target: Tensor | None = None
        self.action: Action | None = None
        self.replay_backward_list: list[Tensor] = []

    def set_target_indices(self, topk_indices: Tensor) -> None:
        self.target = topk_indices
        self.replay_backward_list.append(topk_indices)

    def set_router_replay_action(self, router_replay_action: Action) -> None:
        self.action = router_replay_action

    def clear_router_replay_action(self) -> None:
        self.action = None

    def clear_indices(self) -> None:
        self.target, self.replay_backward_list = None, []

    def get_replay_topk(self, scores: Tensor, topk: int, native: TopK) -> tuple[Tensor, Tensor]:
        if self.action is Action.REPLAY_FORWARD:
            indices = self.target
        elif self.action is Action.REPLAY_BACKWARD:
            indices = self.replay_backward_list.pop(0)
        else:
            return native(scores, topk, None, None)
        return scores.gather(1, indices), indices


class FakeRouter(nn.Module):
    """Keeps what it selected, and in which action."""

    def __init__(self, layer_number: int, *, fusion: bool = False) -> None:
        super().__init__()
        self.layer_number = layer_number
        self.config = SimpleNamespace(moe_router_fusion=fusion)
        self.router_replay: FakeRouterReplay | None = FakeRouterReplay()
        self.weight = nn.Parameter(torch.randn(NUM_EXPERTS, WIDTH))
        self.selected: list[tuple[Action | None, Tensor]] = []

    def forward(self, hidden: Tensor) -> Tensor:
        logits = hidden.reshape(-1, WIDTH) @ self.weight.T

        def native(scores: Tensor, k: int, _: int | None, __: int | None) -> tuple[Tensor, Tensor]:
            return torch.topk(scores, k)

        assert self.router_replay is not None
        values, indices = self.router_replay.get_replay_topk(logits, K, native)
        self.selected.append((self.router_replay.action, indices))
        return torch.zeros_like(logits).scatter(1, indices, values.softmax(-1))


class FakeLayer(nn.Module):
    def __init__(self, layer_number: int) -> None:
        super().__init__()
        self.router = FakeRouter(layer_number)
        self.experts = nn.Parameter(torch.randn(NUM_EXPERTS, WIDTH, WIDTH) / WIDTH)

    def forward(self, hidden: Tensor) -> Tensor:
        weights = self.router(hidden)
        flat = hidden.reshape(-1, WIDTH)
        out = torch.einsum("ne,ewv,nw->nv", weights, self.experts, flat)
        return hidden + out.view_as(hidden)


class FakeChunk(nn.Module):
    """Some of a model's layers, 1-based as Megatron numbers them; each may be recomputed."""

    def __init__(self, layer_numbers: list[int], *, recompute: bool = False) -> None:
        super().__init__()
        torch.manual_seed(sum(layer_numbers))
        self.layers = nn.ModuleList(FakeLayer(number) for number in layer_numbers)
        self.recompute = recompute

    def forward(self, hidden: Tensor) -> Tensor:
        for layer in self.layers:
            if self.recompute and torch.is_grad_enabled():
                hidden = checkpoint(layer, hidden, use_reentrant=True)
            else:
                hidden = layer(hidden)
        return hidden

    def routers(self) -> list[FakeRouter]:
        return [layer.router for layer in self.layers]
