"""A replay under data parallelism and sharded parameters is that of one process, to the bit."""

import sys
import warnings
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from dovetail.replay.errors import ReplayError
from dovetail.replay.session import ReplaySession
from tests.support.moe_families import tiny_model
from tests.support.replay import (
    IDS,
    Outcome,
    assert_same,
    next_token_loss,
    outcome,
    random_routes,
)

WORLD = 2


def replayed(model: nn.Module, session: ReplaySession) -> Outcome:
    with session.replay(random_routes(session, IDS.numel())):
        return outcome(model, lambda: next_token_loss(model, IDS))


def sharded_model(use_reentrant: bool | None) -> nn.Module:
    model = tiny_model("qwen3_moe")
    mesh = init_device_mesh("cpu", (WORLD,))
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    if use_reentrant is not None:
        model.gradient_checkpointing_enable({"use_reentrant": use_reentrant})
    return model


def run_rank(rank: int, folder: str) -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=WORLD
    )
    alone = tiny_model("qwen3_moe")
    want = replayed(alone, ReplaySession(alone))
    model = tiny_model("qwen3_moe")
    session, parallel = ReplaySession(model), DistributedDataParallel(model)
    loss, grads = replayed(parallel, session)
    assert_same(want, (loss, {name.removeprefix("module."): g for name, g in grads.items()}))
    for use_reentrant in (None, True, False):
        model = sharded_model(use_reentrant)
        session = ReplaySession(model)
        loss, grads = replayed(model, session)
        assert_same(want, (loss, {name: g.full_tensor() for name, g in grads.items()}))
        with (
            pytest.raises(ReplayError, match="backward has not passed"),
            session.replay(random_routes(session, IDS.numel())),
        ):
            next_token_loss(model, IDS)
    dist.destroy_process_group()


@pytest.mark.skipif(sys.platform != "linux", reason="gloo and file stores as on Linux")
def test_shards_replay_as_one_process(tmp_path: Path) -> None:
    mp.spawn(run_rank, args=(str(tmp_path),), nprocs=WORLD)  # raises what a rank raises
