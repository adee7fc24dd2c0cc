"""Memory by tag on a GPU, and a pool that is sized by what is left."""

import gc
import json

import pytest
import torch

from dovetail.core.engine import Engine
from dovetail.errors import ConfigError, DeviceError
from dovetail.exec.cuda.device import CudaDevice
from dovetail.exec.cuda.driver import CudaDriver
from dovetail.exec.cuda.mapping import MappedMemory
from dovetail.wire.request import LogprobParams, SamplingParams

pytestmark = pytest.mark.cuda

GPU = torch.device("cuda", 0)
PROMPTS = [list(range(3, 3 + n)) for n in (5, 40, 120)]
GREEDY = SamplingParams(max_new_tokens=24, temperature=0.0, ignore_eos=True)


def free_bytes() -> int:
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    return torch.cuda.mem_get_info(GPU)[0]


@pytest.fixture
def memory() -> MappedMemory:
    return MappedMemory(CudaDriver(GPU))


def test_memory_is_given_back_and_comes_back_at_its_address(memory: MappedMemory) -> None:
    tensor = memory.zeros("weights", (2**28,), torch.float32)
    kv = memory.zeros("kv", (1000,), torch.bfloat16).fill_(3)
    assert tensor.eq(0).all() and memory.num_bytes("weights") == 2**30
    address, before = tensor.data_ptr(), free_bytes()
    assert memory.unmap("weights") == 2**30
    assert free_bytes() - before == 2**30
    assert kv.eq(3).all()
    assert memory.map("weights") == 2**30
    assert free_bytes() == before and tensor.data_ptr() == address
    assert tensor.fill_(5).eq(5).all()
    del tensor
    assert free_bytes() - before == 2**30
    assert kv.eq(3).all()


def test_a_graph_is_right_after_memory_went_and_came(memory: MappedMemory) -> None:
    weight = memory.zeros("weights", (512, 512), torch.float32)
    x, out = torch.ones(512, device=GPU), torch.zeros(512, device=GPU)
    torch.mv(weight, x, out=out)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        torch.mv(weight, x, out=out)
    for value in (2.0, 3.0):
        weight.fill_(value)  # whoever maps memory fills it
        graph.replay()
        assert out.eq(512 * value).all()
        memory.unmap("weights")
        memory.map("weights")


def test_more_than_there_is_is_a_device_error(memory: MappedMemory) -> None:
    with pytest.raises(DeviceError, match="the GPU is full"):
        memory.zeros("kv", (2**45,), torch.uint8)
    assert memory.zeros("kv", (8,), torch.uint8).eq(0).all()


def test_an_engine_goes_on_after_its_memory_went_and_came() -> None:
    device = CudaDevice()
    assert device.memory.can_unmap, device.memory.reason
    with Engine(
        device="cuda", on_device=device, dtype="float32", context_len=512, prefix_cache=False
    ) as engine:
        first = engine.generate(PROMPTS, GREEDY)
        model = engine.port.loop.executor._runner._model
        addresses = {name: p.data_ptr() for name, p in model.named_parameters()}
        kept = {name: p.cpu() for name, p in model.named_parameters()}
        before = free_bytes()
        given_back = device.memory.unmap("weights") + device.memory.unmap("kv")
        assert given_back > sum(p.nbytes for p in kept.values())
        assert free_bytes() - before == given_back
        assert device.memory.map("weights") + device.memory.map("kv") == given_back
        for name, parameter in model.named_parameters():
            assert parameter.data_ptr() == addresses[name]
            parameter.copy_(kept[name])
        torch.cuda.synchronize()
        again = engine.generate(PROMPTS, GREEDY)
    assert [a.token_ids for a in again] == [b.token_ids for b in first]
    assert [a.logprobs for a in again] == [b.logprobs for b in first]


def test_an_engines_memory_is_free_when_it_is_gone() -> None:
    def run() -> None:
        with Engine(device="cuda", kv_memory="2GiB", context_len=512, max_running=4096 - 1) as one:
            one.generate(PROMPTS, GREEDY)

    run()
    before = free_bytes()
    run()
    assert before - free_bytes() < 2**28


# -- the pool ---------------------------------------------------------------------------------


@pytest.fixture
def billion(tmp_path):
    """A model of about 1.2 billion parameters, with random weights."""
    (tmp_path / "config.json").write_text(
        json.dumps(
            {
                "architectures": ["Qwen3ForCausalLM"],
                "vocab_size": 151_936,
                "hidden_size": 2048,
                "intermediate_size": 6144,
                "num_hidden_layers": 16,
                "num_attention_heads": 16,
                "num_key_value_heads": 8,
                "head_dim": 128,
                "max_position_embeddings": 8192,
                "tie_word_embeddings": True,
            }
        )
    )
    return {"model": tmp_path, "device": "cuda", "load_format": "dummy"}


SHAPED = SamplingParams(
    max_new_tokens=6, top_p=0.95, top_k=40, frequency_penalty=0.1, ignore_eos=True,
    logit_bias={7: -5.0},
)  # fmt: skip
REPORTS = LogprobParams(logprob_start_len=0, top_logprobs_num=20, sampling_mask=True)


def test_the_largest_steps_fit_beside_a_pool_of_nine_tenths(billion) -> None:
    total = torch.cuda.mem_get_info(GPU)[1]
    free_bytes()
    with Engine(**billion, memory_fraction=0.9, max_running=256, chunk_size=8192) as engine:
        assert engine.config.reasons["num_pages"].startswith("memory_fraction 0.9 of")
        print(engine.config.reasons["num_pages"])
        after_start = torch.cuda.mem_get_info(GPU)[0]
        prompts = [[(7 * i + j) % 10_000 for j in range(300 + 17 * i)] for i in range(256)]
        outs = engine.generate(prompts, SHAPED, logprobs=REPORTS)
        assert all(len(out.token_ids) == 6 for out in outs)
        least = torch.cuda.mem_get_info(GPU)[0]
    print(f"free of {total / 2**30:.1f} GiB: {after_start / 2**30:.2f}, {least / 2**30:.2f}")
    assert least >= 0.1 * total - 2**28


def test_a_pool_that_is_too_small_is_refused_with_the_numbers(billion) -> None:
    def refusal(**options: object) -> str:
        """Return the message alone: an exception would keep the weights alive."""
        with pytest.raises(ConfigError) as caught:
            Engine(**billion, **options)
        assert caught.value.field == "memory_fraction"
        return caught.value.message

    for options in ({"memory_fraction": 0.01}, {"memory_fraction": 0.001, "graphs": False}):
        message = refusal(**options)
        for words in ("weights", "context_len 8192 needs", "give at least"):
            assert words in message
    least = float(message.split("give at least ")[1].split(",")[0])
    with Engine(**billion, memory_fraction=least + 0.01, graphs=False) as engine:
        assert engine.config.num_pages >= 512
