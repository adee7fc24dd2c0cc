"""One wrong request hurts nobody else, and one wrong folder is named in one line.

The tables of what is refused are in ``tests/unit``; here it is done to a living engine, which must
answer a fixed request as before and have all its pages ([LIVE], [POOL]).
"""

import json
import math
import os
import re
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from dovetail import ConfigError, Engine, RequestError, SamplingParams
from dovetail.cache.ledger import KVLedger
from dovetail.cli import main
from tests.support.server import SRC

CONTEXT_LEN = 64
NUM_PAGES = 40
GOLDEN_IDS = tuple(range(8, 20))


@pytest.fixture(scope="module")
def engine(fx_count_folder: Path) -> Iterator[Engine]:
    options = {"context_len": CONTEXT_LEN, "page_size": 4, "num_pages": NUM_PAGES}
    with Engine(fx_count_folder, **options) as made:
        yield made


@pytest.fixture(autouse=True)
def unharmed(request: pytest.FixtureRequest) -> Iterator[None]:
    """[LIVE] the golden answer; [POOL] nothing held, and a whole context still fits."""
    yield
    if "engine" not in request.fixturenames:
        return
    engine = request.getfixturevalue("engine")
    (golden,) = engine.generate([[7]], SamplingParams(temperature=0, max_new_tokens=12))
    assert golden.token_ids == GOLDEN_IDS
    (long,) = engine.generate([[3]], SamplingParams(temperature=0, max_new_tokens=CONTEXT_LEN - 1))
    assert len(long.token_ids) == CONTEXT_LEN - 1
    stats = engine.stats()
    assert stats.num_free_pages + stats.num_cached_pages == stats.num_pages == NUM_PAGES
    assert (stats.num_running, stats.num_waiting) == (0, 0)


def refusal(call: Callable[[], object]) -> str:
    """Return what the refusal of the call says."""
    with pytest.raises(RequestError) as caught:
        call()
    return str(caught.value)


# -- requests -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("prompt", "field"),
    [
        ("", "text"),
        ([], "prompts"),
        ([[]], "input_ids"),
        ([-1], "input_ids"),
        ([320], "input_ids"),
        ([2**31], "input_ids"),
        ([2**63], "input_ids"),
        ([1.5], "input_ids"),
        ([True], "input_ids"),
        ([[1, "7"]], "input_ids"),
        (torch.tensor([1.5]), "input_ids"),
        (torch.tensor([[1, 2], [3, -4]]), "prompts[1].input_ids"),
        ("\udcff", "text"),
        ({"role": "user", "content": "hi"}, "prompts"),
        ([{"role": "user"}], "messages"),
        ([1] * CONTEXT_LEN, "sampling_params.max_new_tokens"),
        ([1] * (CONTEXT_LEN + 1), "input_ids"),
        ("x" * 100_000, "context length"),
    ],
)
def test_a_wrong_prompt(engine, prompt, field):
    assert field in refusal(lambda: engine.generate(prompt))


def test_one_wrong_prompt_stops_its_whole_batch_before_it_starts(engine):
    cached = engine.stats().num_cached_pages
    assert "prompts[1].input_ids" in refusal(lambda: engine.generate([[9] * 30, [], [9] * 31]))
    assert engine.stats().num_cached_pages == cached, "nothing was forwarded"


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", math.nan),
        ("temperature", math.inf),
        ("temperature", -1.0),
        ("top_p", math.nan),
        ("top_p", 0.0),
        ("top_k", 0),
        ("min_p", -0.1),
        ("min_p", math.nan),
        ("max_new_tokens", -1),
        ("max_new_tokens", CONTEXT_LEN),
        ("max_new_tokens", 2**31 - 1),
        ("max_new_tokens", 2**63),
        ("max_new_tokens", 1e18),
        ("sampling_seed", -1),
        ("sampling_seed", 2**64),
        ("stop", ""),
        ("stop", "\ud800"),
        ("stop_token_ids", [None]),
        ("stop_token_ids", [2**31]),
        ("stop_token_ids", [1] * 65),
    ],
)
def test_a_wrong_parameter(engine, field, value):
    params = SamplingParams(**{field: value})
    for ask in (engine.generate, engine.stream, engine.astream):
        assert field in refusal(lambda ask=ask: ask([7, 8], params))


def test_an_unknown_parameter():
    with pytest.raises(RequestError, match=r"^heat: is no field of SamplingParams"):
        SamplingParams(heat=1)


def test_an_unknown_column(engine):
    assert "capture" in refusal(lambda: engine.generate([7], capture=("experts",)))


def test_extremes_that_are_legal(engine):
    """Numbers that are hard on the sampler, side by side with a plain request."""
    extremes = [
        {"temperature": 1e4},
        {"temperature": 1e-4},
        {"top_p": 1e-300},
        {"top_p": 1 - 1e-12, "top_k": 2**31 - 1},
        {"min_p": 1.0},
        {"min_p": 1e-300, "top_k": 1},
        {"sampling_seed": 2**64 - 1},
        {"stop": "\x00" * 1024},
        {"stop_token_ids": list(range(8, 72)), "ignore_eos": True},
    ]
    params = [SamplingParams(**{"max_new_tokens": 5} | extreme) for extreme in extremes]
    params.append(SamplingParams(temperature=0, max_new_tokens=12))
    *rest, plain = engine.generate([[7]] * len(params), params)
    assert plain.token_ids == GOLDEN_IDS
    for generation in rest:
        assert generation.finish_reason.type in ("stop", "length")
        assert all(math.isfinite(value) and value <= 0 for value in generation.logprobs)


def test_wrong_requests_beside_good_ones(engine):
    """Wrong ones from one thread while another is served."""
    wrong_done = threading.Event()

    def pester() -> None:
        for _ in range(50):
            assert "prompts[1].input_ids" in refusal(lambda: engine.generate([[7], [-1]]))
        wrong_done.set()

    thread = threading.Thread(target=pester)
    thread.start()
    params = SamplingParams(temperature=0, max_new_tokens=12)
    for generation in engine.generate([[7]] * 20, params):
        assert generation.token_ids == GOLDEN_IDS
    thread.join(60)
    assert wrong_done.is_set()


# -- options --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"depht": 1}, "depht"),
        ({"page_size": 0}, "page_size"),
        ({"context_len": 10**9}, "context_len"),
        ({"num_pages": 1}, "num_pages"),
        ({"kv_memory": "much"}, "kv_memory"),
        ({"dtype": "int8"}, "dtype"),
    ],
)
def test_a_wrong_option(fx_count_folder, options, field):
    with pytest.raises(ConfigError) as caught:
        Engine(fx_count_folder, **options)
    assert field in str(caught.value)


# -- folders --------------------------------------------------------------------------------


def edit_json(file: Path, **changes: object) -> None:
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))


def without(name: str) -> Callable[[Path], None]:
    return lambda folder: (folder / name).unlink()


def wrong_shape(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    tensors["model.norm.weight"] = tensors["model.norm.weight"][:-1].clone()
    save_file(tensors, folder / "model.safetensors")


def without_a_tensor(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    del tensors["model.layers.1.mlp.down_proj.weight"]
    save_file(tensors, folder / "model.safetensors")


def without_a_shard(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").rename(folder / "model-00001-of-00002.safetensors")
    where = {name: f"model-0000{1 + i % 2}-of-00002.safetensors" for i, name in enumerate(tensors)}
    index = {"metadata": {}, "weight_map": where}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def truncated(folder: Path) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1000])


def weights_are_a_folder(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors").mkdir()


def tokenizer_is_a_folder(folder: Path) -> None:
    (folder / "tokenizer.json").unlink()
    (folder / "tokenizer.json").mkdir()


def not_safetensors(folder: Path) -> None:
    (folder / "model.safetensors").write_bytes(b"version https://git-lfs.github.com/spec/v1\n")


BROKEN = {
    "no config": (without("config.json"), "config.json"),
    "config is no JSON": (lambda f: (f / "config.json").write_text("{"), "config.json"),
    "config is a list": (lambda f: (f / "config.json").write_text("[]"), "config.json"),
    "unknown architecture": (
        lambda f: edit_json(f / "config.json", architectures=["MambaForCausalLM"]),
        "MambaForCausalLM",
    ),
    "nested config": (
        lambda f: (f / "config.json").write_text('{"x": ' + "[" * 10**5),
        "config.json",
    ),
    "nested names": (
        lambda f: (f / "tokenizer_config.json").write_text('{"x": ' + "[" * 10**5),
        "tokenizer_config.json",
    ),
    "more than memory": (
        lambda f: edit_json(f / "config.json", intermediate_size=2**30),
        "model.layers.0.mlp.gate_proj.weight: has shape",
    ),
    "more than a number": (
        lambda f: edit_json(f / "config.json", hidden_size=2**70),
        "hidden_size: must be below 2**31",
    ),
    "no size": (lambda f: edit_json(f / "config.json", hidden_size=None), "hidden_size"),
    "no weights": (without("model.safetensors"), "safetensors"),
    "no shard": (without_a_shard, "model-00002-of-00002.safetensors"),
    "wrong shape": (wrong_shape, "model.norm.weight"),
    "no tensor": (without_a_tensor, "model.layers.1.mlp.down_proj.weight"),
    "no header": (lambda f: (f / "model.safetensors").write_bytes(b""), "model.safetensors"),
    "half a header": (
        lambda f: os.truncate(f / "model.safetensors", 50),
        "model.safetensors is truncated or damaged",
    ),
    "a folder instead of weights": (weights_are_a_folder, "has no weights"),
    "truncated": (truncated, "model.safetensors"),
    "a pointer instead of weights": (not_safetensors, "model.safetensors"),
    "tokenizer cannot be read": (tokenizer_is_a_folder, "tokenizer.json: cannot be read"),
    "no tokenizer": (without("tokenizer.json"), "load_format='dummy'"),
    "broken tokenizer": (lambda f: (f / "tokenizer.json").write_text("{}"), "tokenizer.json"),
    "broken template": (
        lambda f: edit_json(f / "tokenizer_config.json", chat_template="{% for %}"),
        "chat_template",
    ),
}


@pytest.mark.parametrize(("damage", "word"), BROKEN.values(), ids=BROKEN)
def test_a_broken_folder_is_named_in_one_line(fx_count_folder, tmp_path, capsys, damage, word):
    folder = shutil.copytree(fx_count_folder, tmp_path / "model")
    damage(folder)
    with pytest.raises(ConfigError) as caught:
        Engine(folder)
    assert word in str(caught.value)
    assert main(["generate", "hi", "--model", str(folder)]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err == f"dovetail: error: {caught.value}\n"
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["half a header", "broken template"])
def test_what_cannot_be_served_leaves_no_process(fx_count_folder, tmp_path, name):
    """Found in the engine's process, and in the front end when that process is ready."""
    damage, word = BROKEN[name]
    folder = shutil.copytree(fx_count_folder, tmp_path / "model")
    damage(folder)
    with pytest.raises(ConfigError, match=re.escape(word)) as caught:
        Engine(folder)
    with subprocess.Popen(
        [sys.executable, "-m", "dovetail.cli", "serve", "--port", "0", "--model", str(folder)],
        env={**os.environ, "PYTHONPATH": str(SRC)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,  # whose id all its processes have
    ) as process:
        out, err = process.communicate(timeout=60)
        assert (process.returncode, out, err) == (2, "", f"dovetail: error: {caught.value}\n")
        assert processes_of_session(process.pid) == []


def processes_of_session(session_id: int) -> list[str]:
    """The processes of a session, as the kernel lists them; zombies do not count."""
    found: list[str] = []
    for file in Path("/proc").glob("[0-9]*/stat"):
        try:
            name, _, rest = file.read_text().rpartition(")")
        except (FileNotFoundError, ProcessLookupError):
            continue  # it ended meanwhile
        state, _, _, session = rest.split()[:4]
        if int(session) == session_id and state != "Z":
            found.append(name)
    return found


@pytest.mark.parametrize("place", ["not/there", "file", "empty"])
def test_no_folder_at_all(tmp_path, place):
    (tmp_path / "file").write_text("no folder")
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigError, match=r"config\.json"):
        Engine(tmp_path / place)


def poisoned(folder: Path, copy: Path, token_id: int) -> Path:
    """A checkpoint in which one token poisons its sequence."""
    folder = shutil.copytree(folder, copy)
    tensors = load_file(folder / "model.safetensors")
    tensors["model.embed_tokens.weight"][token_id] = math.nan
    save_file(tensors, folder / "model.safetensors")
    return folder


def test_a_sampling_nan_in_the_weights_ends_the_request_alone(fx_count_folder, tmp_path):
    """One token poisons its sequence: others in the batch are served."""
    folder = poisoned(fx_count_folder, tmp_path / "model", 50)
    params = SamplingParams(temperature=0, max_new_tokens=12)
    with Engine(folder, page_size=4) as engine:
        for _ in range(3):
            bad, good, late = engine.generate([[50, 51, 52], [7], [45]], params)
            assert bad.finish_reason.type == "error" and bad.token_ids == ()
            assert "not finite" in bad.finish_reason.message
            assert good.token_ids == GOLDEN_IDS
            assert late.finish_reason.type == "error" and late.token_ids == (46, 47, 48, 49, 50)
        stats = engine.stats()
        assert stats.num_free_pages + stats.num_cached_pages == stats.num_pages


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("chunk_size", [4, 6, 9])
@pytest.mark.parametrize("name", ["fx_count", "fx_moe"])
def test_a_nan_in_an_early_chunk_ends_the_request_and_is_not_shared(
    request, tmp_path, monkeypatch, name, chunk_size, depth
):
    """A chunk that samples nothing has a status too: pages with NaN would spoil who hits them.

    Nor are those of the chunks before it shared any more: the NaN might come from them.
    """
    folder = poisoned(request.getfixturevalue(f"{name}_folder"), tmp_path / "model", 50)
    params = SamplingParams(temperature=0, max_new_tokens=12)
    prompt = [*range(1, 6), 50, *range(6, 30)]
    published, publish = set[int](), KVLedger.publish

    def note(ledger, holding, token_ids, num_computed):
        if token_ids[0] == prompt[0]:
            published.add(num_computed)
        publish(ledger, holding, token_ids, num_computed)

    monkeypatch.setattr(KVLedger, "publish", note)
    with Engine(folder, page_size=4, chunk_size=chunk_size, depth=depth) as engine:
        (alone,) = engine.generate([[7]], params)
        for _ in range(2):
            bad, good = engine.generate([prompt, [7]], params)
            assert bad.finish_reason.type == "error" and bad.token_ids == ()
            assert "not finite" in bad.finish_reason.message
            assert good.token_ids == alone.token_ids != ()
            assert good.finish_reason == alone.finish_reason
            assert published == ({4} if chunk_size == 4 else set())  # all before that of the NaN
            assert engine.port.ledger.match_len(b"", prompt, max_cached=len(prompt)) == 0
        (scored,) = engine.generate([prompt], SamplingParams(max_new_tokens=0))
        assert scored.finish_reason.type == "error"
        stats = engine.stats()
        assert stats.num_free_pages + stats.num_cached_pages == stats.num_pages
