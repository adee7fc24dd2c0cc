"""What ``dovetail config explain`` shows of a model and of the device that runs it.

Builds the model without memory.
"""

from typing import Any

import torch

from dovetail.config.pool import BYTES_PER_ELEMENT, kv_page_bytes
from dovetail.config.schema import EngineConfig
from dovetail.dist.comm import LocalComm
from dovetail.exec.cuda.arena import PlainStepMemory, StepMemory, step_memory
from dovetail.exec.cuda.driver import tagged_memory
from dovetail.exec.memory import TaggedMemory, host_memory
from dovetail.kernels.choices import OptionalBackend, kernel_choices, optional_backends
from dovetail.models.registry import build_model


def model_facts(config: EngineConfig) -> dict[str, Any]:
    """Return what the model is and what it costs. Counts are of elements, sizes of bytes."""
    model, moe = config.model, config.model.moe
    skeleton = build_model(
        model, dtype=getattr(torch, config.dtype), device="meta", comm=LocalComm()
    )
    num_params = sum(parameter.numel() for parameter in skeleton.parameters())
    num_expert_params = sum(
        parameter.numel() for name, parameter in skeleton.named_parameters() if ".experts." in name
    )
    num_idle = 0
    if moe is not None:
        num_idle = (
            num_expert_params // moe.num_experts * (moe.num_experts - moe.num_experts_per_tok)
        )
    pool_tokens = config.num_pages * config.page_size
    kv_token_bytes = kv_page_bytes(model, dtype=config.dtype, page_size=1, capture=config.capture)
    return {
        "architecture": model.architecture,
        "num_layers": model.num_layers,
        "num_moe_layers": 0 if moe is None else len(moe.layer_ids),
        "num_experts": 0 if moe is None else moe.num_experts,
        "num_experts_per_tok": 0 if moe is None else moe.num_experts_per_tok,
        "hidden_size": model.hidden_size,
        "num_heads": model.num_heads,
        "num_kv_heads": model.num_kv_heads,
        "head_dim": model.head_dim,
        "vocab_size": model.vocab_size,
        "max_position_embeddings": model.max_position_embeddings,
        "sliding_window": model.sliding_window,
        "eos_token_ids": list(model.eos_token_ids),
        "num_params": num_params,
        "num_params_per_token": num_params - num_idle,
        "weight_bytes": num_params * BYTES_PER_ELEMENT[config.dtype],
        "kv_token_bytes": kv_token_bytes,
        "kv_pool_bytes": kv_token_bytes * pool_tokens,
        "kv_pool_tokens": pool_tokens,
        "kv_pool_contexts": round(pool_tokens / config.context_len, 2),
    }


_MEMORY, _STEP_MEMORY = "memory of weights and KV", "memory of a step"


def device_means(config: EngineConfig) -> list[dict[str, str]]:
    """Return what computes and what remembers on the device: ``what``, ``by``, ``reason`` each."""
    means = [
        {"what": choice.operations, "by": choice.backend, "reason": choice.reason}
        for choice in kernel_choices(config.device, config.moe_backend)
    ]
    if config.device == "cuda" and not torch.cuda.is_available():
        unknown = {"by": "not known", "reason": "no GPU answers here: what its driver can decides"}
        return [*means, *({"what": what} | unknown for what in (_MEMORY, _STEP_MEMORY))]
    memory: TaggedMemory = host_memory()
    steps: StepMemory = PlainStepMemory("the device is the host")
    if config.device == "cuda":
        gpu = torch.device("cuda", 0)
        memory, steps = tagged_memory(gpu), step_memory(gpu)
        if config.memory_fraction is None:
            steps = PlainStepMemory("the pool's size is given, so nothing is measured")
    by = "mapped" if memory.can_unmap else "torch"
    means.append({"what": _MEMORY, "by": by, "reason": memory.reason})
    by = "one segment" if steps.is_reserved else "torch"
    means.append({"what": _STEP_MEMORY, "by": by, "reason": steps.reason})
    return means


def optional_means(config: EngineConfig) -> tuple[OptionalBackend, ...]:
    """Return what else could compute, whether it does, and why."""
    return optional_backends(config.device, config.moe_backend)
