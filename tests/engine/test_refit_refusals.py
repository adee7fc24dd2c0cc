"""New weights that will not do: named in the error, and the old ones are served as before."""

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from dovetail.errors import RequestError
from dovetail.wire.request import SamplingParams
from tests.support.refit import GATE, ask, open_engine, same

NORM = "model.norm.weight"
EMBED = "model.embed_tokens.weight"


def with_tensor(name: str, tensor: object):
    return lambda tensors: tensors | {name: tensor}


def with_element(value: float):
    def change(tensors: dict) -> dict:
        bad = tensors[GATE].clone()
        bad[2, 3] = value
        return tensors | {GATE: bad}

    return change


BAD = {
    "missing": (lambda t: {k: v for k, v in t.items() if k != GATE}, GATE, "is missing among"),
    "left over": (with_tensor("model.layers.9.x", torch.ones(2)), "model.layers.9.x", "no place"),
    "shape": (with_tensor(GATE, torch.ones(64, 32)), GATE, r"has shape \[64, 32\].*\[32, 64\]"),
    "nan": (with_element(torch.nan), GATE, "is not finite in float32"),
    "inf": (with_element(-torch.inf), GATE, "is not finite in float32"),
    "too large": (
        with_tensor(NORM, torch.full((64,), 1e39, dtype=torch.float64)),
        NORM,
        "is not finite in float32",
    ),
    "integers": (with_tensor(NORM, torch.ones(64, dtype=torch.int8)), NORM, "is int8; give"),
    "an array": (with_tensor(NORM, np.ones(64)), NORM, "is a ndarray; give torch tensors"),
    "no data": (with_tensor(NORM, torch.ones(64, device="meta")), NORM, "has no plain data"),
    "sparse": (with_tensor(NORM, torch.ones(64).to_sparse()), NORM, "has no plain data"),
    "twice": (lambda t: [*t.items(), (NORM, t[NORM])], NORM, "is given twice"),
    "nothing": (lambda t: {}, EMBED, "is missing among.*; none are given"),
    "wrapped": (
        lambda t: {f"module.{name}": tensor for name, tensor in t.items()},
        EMBED,
        r"; given is 'module\.model\.embed_tokens\.weight': take 'module\.' off the names",
    ),
    "compiled": (
        lambda t: [(f"_orig_mod.{name}", tensor) for name, tensor in t.items()],
        EMBED,
        r"take '_orig_mod\.' off the names",
    ),
    "other names": (
        lambda t: {f"{name}.x": tensor for name, tensor in t.items()},
        EMBED,
        r"; given are \d+, the first is '.*\.x'",
    ),
}


@pytest.fixture(scope="module")
def served(request: pytest.FixtureRequest):
    with open_engine(request.getfixturevalue("qwen3_moe_folder")) as engine:
        yield engine, ask(engine)


@pytest.mark.parametrize("case", BAD)
def test_bad_weights_are_named_and_the_old_ones_served(case, served, new_tensors):
    change, name, words = BAD[case]
    engine, want = served
    with pytest.raises(RequestError, match=words) as caught:
        engine.refit(change(new_tensors))
    assert caught.value.field == name
    assert same(ask(engine), want)
    assert engine.stats().num_cached_pages > 0, "the cache was given up for nothing"


@pytest.mark.parametrize(
    ("version", "words"),
    [
        (0, "0 is served; give a larger"),
        (-1, "give at most"),
        (2**31, "give at most"),
        ("3", "give a whole number"),
        (True, "give a whole number"),
        (1.0, "give a whole number"),
    ],
)
def test_a_bad_version_changes_nothing(version, words, served, new_tensors):
    engine, want = served
    with pytest.raises(RequestError, match=words) as caught:
        engine.refit(new_tensors, version=version)
    assert caught.value.field == "version"
    assert same(ask(engine), want)


def test_without_room_for_a_second_copy_the_old_ones_are_served(served, new_tensors, monkeypatch):
    engine, want = served

    def full(*_: object, **__: object) -> torch.Tensor:
        raise torch.OutOfMemoryError("full")

    with monkeypatch.context() as patch:
        patch.setattr(torch, "empty_like", full)
        with pytest.raises(RequestError, match=r"no room for [0-9,]+ bytes; start the engine"):
            engine.refit(new_tensors)
    assert same(ask(engine), want)


def test_no_version_comes_after_the_last(qwen3_moe_folder, new_tensors):
    with open_engine(qwen3_moe_folder) as engine:
        assert engine.refit(new_tensors, version=2**31 - 1) == 2**31 - 1
        with pytest.raises(RequestError, match="version: "):
            engine.refit(new_tensors)
        [generation] = engine.generate([5], SamplingParams(max_new_tokens=1))
    assert generation.weight_versions == (2**31 - 1,)


@pytest.mark.parametrize(
    "change",
    [
        lambda tensors: list(tensors.values()),
        lambda tensors: list(tensors),
        lambda tensors: torch.nn.Linear(2, 2),
        lambda tensors: None,
        lambda tensors: tensors | {5: torch.ones(2)},
    ],
    ids=["tensors alone", "names alone", "a module", "None", "a number for a name"],
)
def test_what_is_no_pairs_of_names_and_tensors_is_named(change, served, new_tensors):
    engine, want = served
    with pytest.raises(RequestError, match="named_parameters"):
        engine.refit(change(new_tensors))
    assert same(ask(engine), want)


def test_a_tied_head_may_be_given_twice_but_not_with_two_values(qwen3_folder):
    tensors = load_file(qwen3_folder / "model.safetensors")
    embedding = tensors["model.embed_tokens.weight"]
    with open_engine(qwen3_folder) as engine:
        want = ask(engine)
        with pytest.raises(RequestError, match=r"differs from model\.embed_tokens"):
            engine.refit(tensors | {"lm_head.weight": 2 * embedding})
        assert engine.refit(tensors | {"lm_head.weight": embedding.clone()}, version=7) == 7
        assert same(ask(engine), want)
