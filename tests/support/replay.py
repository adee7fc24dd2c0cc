"""Token ids, routes and losses to replay with, and what a replay must not change."""

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor, nn

from dovetail.replay.packing import RouteBatch, route_dtype
from dovetail.replay.records import RouteTrace
from dovetail.replay.session import ReplaySession

IDS = torch.tensor([[5, 9, 3, 7, 11, 4], [8, 8, 2, 60, 31, 12]])

Outcome = tuple[Tensor, dict[str, Tensor]]  # loss, gradient of each parameter


def random_routes(session: ReplaySession, num_tokens: int, seed: int = 6) -> RouteBatch:
    """Return a row of random legal ids for each token."""
    return RouteBatch(
        random_ids(num_tokens, session, seed).to(route_dtype(session.num_experts)),
        torch.ones(num_tokens, dtype=torch.bool),
        session.layer_ids,
        session.num_experts,
    )


def random_trace(token_ids: list[int], session: ReplaySession, seed: int = 6) -> RouteTrace:
    """Return a trace of random legal ids: a row for each token but the last."""
    ids = random_ids(len(token_ids) - 1, session, seed).numpy()
    return RouteTrace.of_tokens(
        ids.astype(np.int64),
        token_ids,
        layer_ids=session.layer_ids,
        num_experts=session.num_experts,
    )


def random_ids(num_tokens: int, session: ReplaySession, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    shape = (num_tokens, len(session.layer_ids), session.num_experts)
    return torch.rand(shape, generator=generator).argsort(-1)[..., : session.num_experts_per_tok]


def next_token_loss(model: nn.Module, input_ids: Tensor) -> Tensor:
    logits = model(input_ids=input_ids, use_cache=False).logits.float()
    labels = input_ids.roll(-1, 1)
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())


def outcome(model: nn.Module, loss: Callable[[], Tensor]) -> Outcome:
    """Compute a loss and its gradients."""
    model.zero_grad()
    value = loss()
    value.backward()
    grads = {
        name: parameter.grad.clone()
        for name, parameter in model.named_parameters()
        if parameter.grad is not None
    }
    return value.detach(), grads


def assert_same(a: Outcome, b: Outcome) -> None:
    """Bit for bit."""
    assert torch.equal(a[0], b[0])
    assert a[1].keys() == b[1].keys()
    assert [name for name in a[1] if not torch.equal(a[1][name], b[1][name])] == []
