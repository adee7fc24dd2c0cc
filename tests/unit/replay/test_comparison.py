"""The file of a comparison comes back as it was, and what is none is refused."""

from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch

from dovetail.replay.comparison import Comparison
from dovetail.replay.mismatch import measure_mismatch

LAYERS, K = (1, 3, 4), 2


def some_comparison(*, routes: bool = True) -> Comparison:
    rng = np.random.default_rng(0)
    lengths, starts = (4, 7, 3), (2, 1, 5)
    rollout = [np.log(rng.uniform(0.05, 0.9, n)) for n in lengths]
    return Comparison.of_arrays(
        rollout,
        {
            "live": [row + rng.normal(0, 0.3, len(row)) for row in rollout],
            "replayed": [torch.tensor(row) + 0.01 for row in rollout],
        },
        starts=starts,
        masks=[np.arange(n) != 1 for n in lengths],
        overlaps=[
            rng.integers(0, K + 1, (start + n - 1, len(LAYERS)))
            for start, n in zip(starts, lengths, strict=True)
        ]
        if routes
        else None,
        layer_ids=LAYERS if routes else (),
        num_experts_per_tok=K if routes else 0,
        title="step 7",
    )


@pytest.mark.parametrize("routes", [True, False])
def test_a_file_comes_back(tmp_path: Path, routes: bool) -> None:
    before = some_comparison(routes=routes)
    before.save(tmp_path / "a")
    after = Comparison.load(tmp_path / "a")
    for name in ("layer_ids", "num_experts_per_tok", "title", "arm_names"):
        assert getattr(after, name) == getattr(before, name)
    for a, b in zip(after.sequences, before.sequences, strict=True):
        assert a.start == b.start
        for mine, theirs in ((a.rollout, b.rollout), (a.mask, b.mask)):
            np.testing.assert_array_equal(mine, theirs)
        for arm in before.arm_names:
            np.testing.assert_array_equal(a.arms[arm], b.arms[arm])
        assert (a.overlap is None) == (b.overlap is None) == (not routes)
        if routes:
            np.testing.assert_array_equal(a.overlap, b.overlap)


def test_measures_are_those_of_its_tokens() -> None:
    comparison = some_comparison()
    train = np.concatenate([one.arms["live"] for one in comparison.sequences])
    rollout = np.concatenate([one.rollout for one in comparison.sequences])
    mask = np.concatenate([one.mask for one in comparison.sequences])
    number = np.repeat([0, 1, 2], [4, 7, 3])
    want = measure_mismatch(train, rollout, mask=mask, sequences=number)
    found = comparison.measure("live")
    assert (found.k3, found.num_tokens, found.num_sequences) == (want.k3, 11, 3)
    assert found.intervals == want.intervals
    assert len(comparison.survival("live")[0]) == 11


def test_routes_are_counted_by_loops() -> None:
    comparison = some_comparison()
    total = differs = slots = tokens = 0
    for one in comparison.sequences:
        for row in one.overlap.tolist():
            total += len(row)
            differs += sum(common < K for common in row)
            slots += sum(row)
            tokens += any(common < K for common in row)
    rows = total // len(LAYERS)
    assert comparison.routes() == pytest.approx(
        {
            "router_diff": differs / total,
            "slot_overlap": slots / (total * K),
            "token_any_diff": tokens / rows,
            "layers_per_token": differs / rows,
        }
    )
    assert some_comparison(routes=False).routes() == {}


def test_the_map_has_the_share_of_sequences_at_each_position() -> None:
    comparison = some_comparison()
    share = comparison.route_map()
    assert share.shape == (3, 7)
    for layer in range(3):
        for position in range(7):
            there = [one.overlap for one in comparison.sequences if len(one.overlap) > position]
            off = sum(int(overlap[position, layer]) < K for overlap in there)
            assert share[layer, position] == pytest.approx(off / len(there))
    one = comparison.route_map(0)
    np.testing.assert_array_equal(one, (comparison.sequences[0].overlap < K).T)


def _file(tmp_path: Path) -> dict:
    some_comparison().save(tmp_path / "a")
    return msgspec.msgpack.decode((tmp_path / "a").read_bytes())


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda f: f | {"format": "other"}, "this is a 'other'"),
        (lambda f: f | {"version": 2}, "version 2; this reads 1"),
        (lambda f: f | {"sequences": []}, "there are no sequences"),
        (lambda f: f | {"arms": ["live"]}, "sequence 0 has bytes missing"),
        (lambda f: f | {"layer_ids": [1, 2]}, "bytes missing|overlap"),
        (lambda f: {key: f[key] for key in f if key != "title"}, "does not hold together.*title"),
        (
            lambda f: f | {"sequences": [f["sequences"][0] | {"rollout": b"abcd"}]},
            r"sequence 0: live is \(4,\), the rollout has 1 tokens",
        ),
        (
            lambda f: f | {"sequences": [f["sequences"][0] | {"rollout": b"abc"}]},
            "sequence 0 has bytes missing",
        ),
        (lambda f: f | {"arms": ["live", "live"]}, "an arm is named twice"),
        (lambda f: f | {"num_experts_per_tok": 1}, "sequence 0: overlap of 2 experts of 1"),
        (lambda f: f | {"num_experts_per_tok": 0}, "num_experts_per_tok is 0"),
    ],
)
def test_a_file_that_does_not_hold_together_is_refused(tmp_path: Path, spoil, message) -> None:
    (tmp_path / "b").write_bytes(msgspec.msgpack.encode(spoil(_file(tmp_path))))
    with pytest.raises(ValueError, match=message):
        Comparison.load(tmp_path / "b")


@pytest.mark.parametrize(
    "content", [b"", b"\x80", b"not msgpack", b"\x81\xa1a" * 300, b"{}", b"\x01"]
)
def test_other_files_are_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "c").write_bytes(content)
    with pytest.raises(ValueError, match=r"^this is no comparison; Comparison\.save of"):
        Comparison.load(tmp_path / "c")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"starts": [1, 2]}, "starts has 2 sequences, the rollout 3"),
        ({"arms": {}}, "there are no arms"),
        ({"layer_ids": ()}, "overlap and layer_ids belong together"),
        ({"layer_ids": (1, 2)}, r"overlap is not \[rows, 2 layers\]"),
        ({"arms": {"live": [[0.1], [0.2, 0.1], [0.3]]}}, r"sequence 1: live is \(2,\)"),
        ({"masks": [[1], [1], [1, 0]]}, r"sequence 2: mask is \(2,\)"),
        ({"num_experts_per_tok": 0}, "num_experts_per_tok is 0"),
        ({"masks": [[0]] * 3}, "no token counts"),
        (
            {"arms": {"live": [[-0.1], [np.nan], [-0.3]]}},
            "sequence 1: live has 1 logprobs that count and are not finite; leave them out",
        ),
    ],
)
def test_arrays_that_do_not_fit_are_refused(change, message) -> None:
    fields = {
        "arms": {"live": [[-0.1], [-0.2], [-0.3]]},
        "starts": [1, 1, 1],
        "overlaps": [np.ones((1, 3))] * 3,
        "layer_ids": LAYERS,
        "num_experts_per_tok": K,
    }
    Comparison.of_arrays([[-1.0]] * 3, **fields)
    with pytest.raises(ValueError, match=message):
        Comparison.of_arrays([[-1.0]] * 3, **fields | change)


def test_what_does_not_count_need_not_be_finite(tmp_path: Path) -> None:
    rows, masks = [[-1.0, np.nan]], [[1, 0]]
    comparison = Comparison.of_arrays(rows, {"live": rows}, starts=[1], masks=masks)
    comparison.save(tmp_path / "a")
    assert Comparison.load(tmp_path / "a").measure("live").k3 == 0


def test_tensors_may_carry_gradients() -> None:
    rows = [torch.tensor([-1.0, -2.0], requires_grad=True)]
    comparison = Comparison.of_arrays(rows, {"live": rows}, starts=[1], masks=[torch.ones(2)])
    assert comparison.sequences[0].rollout.tolist() == [-1, -2]


def test_a_folder_that_is_missing_is_named(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"there is no folder .*none; make it first"):
        some_comparison().save(tmp_path / "none" / "a")


def test_without_routes_logprobs_must_be_finite_as_well() -> None:
    with pytest.raises(ValueError, match="sequence 0: rollout has 1 logprobs that count"):
        Comparison.of_arrays([[-np.inf]], {"live": [[-1.0]]}, starts=[1])
