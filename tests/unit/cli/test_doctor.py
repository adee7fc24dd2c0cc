"""``dovetail doctor``: what it finds has a fix, and its exit code says whether the engine runs."""

import json
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from dovetail.cli import doctor, main
from dovetail.cli.doctor import Finding
from dovetail.config.gpu import Gpu
from dovetail.exec.memory import PlainMemory
from dovetail.kernels import choices

Capture = pytest.CaptureFixture[str]
H200 = Gpu(name="NVIDIA H200", memory_bytes=2**37)


def broken() -> tuple[int, ...]:
    raise OSError("no such file")


def test_all_is_well_here(capsys: Capture) -> None:
    assert main(["doctor", "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert said["can_run"] is True
    findings = {item["what"]: item for item in said["findings"]}
    assert findings["embedded model"]["verdict"] == "ok"
    assert {"python", "torch", "cpu", "OpenMP", "gpu", "pinned memory", "mapped memory"} < set(
        findings
    )
    assert set(doctor.OPTIONAL) < set(findings)
    for item in said["findings"]:
        assert item["verdict"] == "ok" or item["fix"]


def test_other_tokens_are_a_problem_and_exit_code_1(
    capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor, "GOLDEN_TOKEN_IDS", (1, 2))
    monkeypatch.setenv("COLUMNS", "200")
    assert main(["doctor"]) == 1
    said = capsys.readouterr().out
    assert "problem" in said and "generates [43, 555], not [1, 2]" in said
    assert "cannot run here" in said


def test_a_model_that_does_not_load_is_a_problem() -> None:
    finding = doctor._embedded_model("embedded model", broken)
    assert finding.verdict == "problem" and finding.blocks and "no such file" in finding.detail


@pytest.mark.parametrize(
    ("num_threads", "policy", "verdict"),
    [
        (1, None, "ok"),
        (2, "passive", "ok"),
        (2, None, "missing"),
        (2, "ACTIVE", "missing"),
        (3, "PASSIVE", "problem"),
    ],
)
def test_threads_that_spin_are_noticed(
    num_threads: int, policy: str | None, verdict: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor, "num_usable_cores", lambda: 2)
    finding = doctor._openmp(num_threads, policy)
    assert finding.verdict == verdict and not finding.blocks
    assert ("OMP_" in finding.fix) == (verdict != "ok")


def test_a_gpu_is_used_when_it_answers_and_has_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor.torch.cuda, "get_device_name", lambda: "NVIDIA H200")
    assert doctor._gpu(is_there=False, answers=False, has_triton=False).verdict == "ok"
    for answers, has_triton, words in ((False, True, "CUDA build"), (True, False, "triton")):
        finding = doctor._gpu(is_there=True, answers=answers, has_triton=has_triton)
        assert finding.verdict == "missing" and not finding.blocks
        assert words in finding.fix
    finding = doctor._gpu(is_there=True, answers=True, has_triton=True)
    assert finding.verdict == "ok" and "NVIDIA H200" in finding.detail


def test_a_missing_package_comes_with_its_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "_version", lambda name: None)
    assert doctor._optional("huggingface_hub") == Finding(
        what="huggingface_hub",
        verdict="missing",
        detail="is for models by their name on the Hugging Face hub",
        fix="pip install huggingface_hub",
    )


def test_memory_that_cannot_be_mapped_says_what_to_do() -> None:
    assert doctor._mapped_memory(None).verdict == "ok"
    plain = PlainMemory(torch.device("cuda", 0), "the package cuda-bindings is not installed")
    finding = doctor._mapped_memory(plain)
    assert finding.verdict == "missing" and "cuda-bindings" in finding.fix
    assert "cuda-bindings is not installed" in finding.detail and not finding.blocks


@pytest.mark.parametrize(("num_unpinned", "verdict"), [(0, "ok"), (1, "missing")])
def test_memory_is_pinned_as_the_engine_does_it(num_unpinned: int, verdict: str) -> None:
    assert doctor._pinned_memory(None).verdict == "ok"
    asked: list[int] = []
    device: Any = SimpleNamespace(host_block=asked.append, num_unpinned=num_unpinned)
    finding = doctor._pinned_memory(device)
    assert asked == [4096] and finding.verdict == verdict and not finding.blocks


def test_kernels_are_named_by_operation() -> None:
    assert "all else: torch" in doctor._kernels(None).detail
    old = Gpu(name="Old", memory_bytes=2**33, problem="it is old")
    assert doctor._kernels(old) == doctor._kernels(None)
    assert "fused_moe: triton" in doctor._kernels(H200).detail


def test_optional_backends_are_named_with_what_was_chosen_and_why(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(choices, "find_spec", lambda name: name if name == "flash_attn" else None)
    for gpu, words in ((None, "computes on GPUs alone"), (H200, "there is no adapter")):
        found = {finding.what: finding for finding in doctor._optional_backends(gpu)}
        assert found["FlashAttention"].detail.startswith("installed, not chosen for paged_att")
        assert found["FlashInfer"].detail.startswith("not installed, not chosen for paged_att")
        assert words in found["FlashInfer"].detail
        assert all(finding.verdict == "ok" for finding in found.values())
    assert "not chosen for fused_moe: no wait" in found["torch grouped_mm"].detail
    [*_, on_cpu] = doctor._optional_backends(None)
    assert on_cpu.detail.startswith("installed, chosen for fused_moe: one call")
