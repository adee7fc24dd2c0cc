"""``scripts/gpu-wheels``: what it asks pip for, and what it keeps. Nothing is downloaded."""

import importlib.machinery
import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

SCRIPT = Path(__file__).parents[3] / "scripts" / "gpu-wheels"


@pytest.fixture(scope="module")
def script() -> ModuleType:
    loader = importlib.machinery.SourceFileLoader("gpu_wheels", str(SCRIPT))
    spec = importlib.util.spec_from_loader("gpu_wheels", loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    was, sys.dont_write_bytecode = sys.dont_write_bytecode, True
    loader.exec_module(module)
    sys.dont_write_bytecode = was
    return module


def words_of(script: ModuleType, capsys, *argv: str) -> list[str]:
    assert script.main([*argv, "--dry-run"]) == 0
    return capsys.readouterr().out.split()


def test_it_asks_for_what_is_needed_and_the_host_lacks(script, capsys) -> None:
    words = words_of(script, capsys, "wheels")
    names = {script.name_of(word) for word in words[words.index("wheels") + 1 :]}
    assert {"msgspec", "rich", "starlette", "pytest", "hypothesis", "pillow"} <= names
    assert not names & {"torch", "triton", "numpy", "transformers", "dovetail"}
    assert words[words.index("--python-version") + 1] == "3.12"
    assert "--only-binary=:all:" in words and words[words.index("-c") + 1].endswith(
        "constraints.txt"
    )


def test_the_host_may_have_other_things(script, capsys) -> None:
    words = words_of(script, capsys, "wheels", "--python", "3.11", "--without", "Prometheus_Client")
    assert "numpy" in words and "prometheus-client" not in words
    assert words[words.index("--python-version") + 1] == "3.11"


def test_platforms_go_down_from_the_hosts_glibc(script) -> None:
    found = script.platforms("2.28")
    assert found[0] == "manylinux_2_28_x86_64" and "manylinux_2_17_x86_64" in found
    assert "manylinux_2_29_x86_64" not in found and "manylinux2014_x86_64" in found
    with pytest.raises(SystemExit, match=r"2\.x"):
        script.platforms("2.x")


def test_a_failure_of_pip_is_the_scripts_failure(script, monkeypatch, tmp_path, capsys) -> None:
    monkeypatch.setattr(script, "command", lambda *args: [sys.executable, "-c", "exit(3)"])
    assert script.main([str(tmp_path)]) == 3
    assert "pip has failed" in capsys.readouterr().err


def test_what_the_host_has_is_left_out_though_others_need_it(
    script, monkeypatch, tmp_path, capsys
) -> None:
    """pip takes numpy for matplotlib; installed over the host's, it would be another version."""
    wheels = ("rich-15.0.0-py3-none-any.whl", "numpy-2.4.6-cp312-cp312-manylinux_2_28_x86_64.whl")
    code = f"for name in {wheels}: open(name, 'w').close()"
    monkeypatch.setattr(script, "command", lambda *args: [sys.executable, "-c", code])
    monkeypatch.chdir(tmp_path)
    assert script.main([str(tmp_path)]) == 0
    assert [wheel.name for wheel in tmp_path.iterdir()] == [wheels[0]]
    assert f"left out: {wheels[1]}" in capsys.readouterr().out
    assert script.main([str(tmp_path), "--without", "Rich"]) == 0
    assert [wheel.name for wheel in tmp_path.iterdir()] == [wheels[1]]
