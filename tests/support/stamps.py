"""FX-STAMP: a model whose logprobs and expert rows tell in which forward they were computed.

Deterministic arithmetic hides a number that was computed again and written over; here it shows.
"""

import math
from collections.abc import Callable

import torch

from dovetail.attention.backend import ForwardContext
from dovetail.config.model import MoeConfig
from dovetail.config.schema import EngineConfig
from dovetail.exec.device import CpuDevice, Device
from dovetail.exec.executor import Executor, Runner
from dovetail.exec.runner import StepRunner
from tests.support.scripted import VOCAB_SIZE, plain_config
from tests.support.stepper import Stepper

STAMP_UNIT = 1 / 64
LAYERS, DIGIT, MAX_POSITION = (1, 2, 5), 64, 64


class StampModel:
    """Draws token ``(7 p + 3) mod 29 + 3`` after position p, with a logit that grows each forward.

    Hidden states are (position, number of the forward).
    """

    def __init__(self, config) -> None:
        self.config = config
        self.num_forwards = 0

    def hidden(self, ctx: ForwardContext) -> torch.Tensor:
        self.num_forwards += 1
        stamps = torch.full_like(ctx.positions, self.num_forwards)
        return torch.stack([ctx.positions, stamps], dim=1).double()

    def logits(self, hidden_NM: torch.Tensor) -> torch.Tensor:
        positions, stamps = hidden_NM[:, 0].long(), hidden_NM[:, 1]
        logits = hidden_NM.new_zeros(len(hidden_NM), VOCAB_SIZE)
        return logits.scatter(1, after(positions)[:, None], stamps[:, None] * STAMP_UNIT).float()


def after(position):
    """The token drawn after a position."""
    return (7 * position + 3) % 29 + 3


def stamp_of(logprob: float, *, is_drawn: bool = True) -> int:
    """Return the number of the forward that a logprob comes from."""
    # x - log(e^x + V - 1) for the drawn token, and minus that logarithm for any other.
    odds = math.exp(logprob) if is_drawn else 1 - (VOCAB_SIZE - 1) * math.exp(logprob)
    return round(math.log(odds * (VOCAB_SIZE - 1) / (1 - odds)) / STAMP_UNIT)


class RoutingStampModel:
    """``StampModel`` with a router: experts are (step, 64 + step, 128 + position, 192 + layer)."""

    def __init__(self, config) -> None:
        self.stamps = StampModel(config)

    def hidden(self, ctx: ForwardContext) -> torch.Tensor:
        hidden = self.stamps.hidden(ctx)
        assert ctx.recorder is not None
        step = self.stamps.num_forwards
        for layer in range(len(LAYERS)):
            ids_TK = torch.stack(
                [
                    torch.full_like(ctx.positions, step // DIGIT),
                    torch.full_like(ctx.positions, DIGIT + step % DIGIT),
                    2 * DIGIT + ctx.positions,
                    torch.full_like(ctx.positions, 3 * DIGIT + layer),
                ],
                dim=1,
            )
            direct = ctx.recorder.direct(layer)
            if direct is not None:  # a router that records by itself
                direct.routes_CLK[direct.kv_slots_T, layer] = ids_TK.to(direct.routes_CLK.dtype)
            ctx.recorder.record(layer, ids_TK, torch.ones(ids_TK.shape))
        return hidden

    def logits(self, hidden_NM: torch.Tensor) -> torch.Tensor:
        return self.stamps.logits(hidden_NM)


def stepper_of(
    device: Device | None = None,
    *,
    num_experts: int = 255,
    make_runner: Callable[[EngineConfig, RoutingStampModel, Device], Runner] = StepRunner,
    **options: object,
) -> Stepper:
    moe = MoeConfig(
        num_experts=num_experts,
        num_experts_per_tok=4,
        intermediate_size=8,
        norm_topk_prob=True,
        layer_ids=LAYERS,
    )
    config = plain_config(
        context_len=MAX_POSITION,
        **{"page_size": 4, "num_pages": 48, "chunk_size": 11, "max_running": 5}
        | {"max_payload_bytes": 1 << 16}
        | options,
        capture=("experts",),
        moe=moe,
    )
    device = device or CpuDevice()
    runner = make_runner(config, RoutingStampModel(config.model), device)
    executor = Executor(config, runner, device)
    return Stepper(config, executor, token_bytes=lambda _: b"")
