"""What every benchmark line says of its run, and where it goes."""

import torch

import dovetail
from benchmarks import common
from benchmarks.gpu_rates import driver_version


def test_versions_are_those_that_run_whether_installed_or_not(monkeypatch) -> None:
    """On a machine where the source is on the path alone, packages know nothing of it."""

    def unknown(name: str) -> str:
        raise common.PackageNotFoundError(name)

    monkeypatch.setattr(common, "version", unknown)
    monkeypatch.setattr(common, "rates", dict)
    versions = common.describe_run(["-m", "benchmarks.x"])["versions"]
    assert isinstance(versions, dict)
    assert versions["dovetail"] == dovetail.__version__
    assert versions["cuda"] == torch.version.cuda and versions["torch"] is None


def test_a_line_of_a_gpu_has_its_rates_and_names_the_host(monkeypatch) -> None:
    """The host's own rates are not even measured."""
    monkeypatch.delattr(common, "rates")
    gpu = {"device": "NVIDIA H200", "driver": "1.2", "host": "a CPU", "rates": {"read_GB_per_s": 4}}
    line = common.describe_run(["-m", "benchmarks.x"], gpu=gpu)
    assert gpu.items() <= line.items()


def test_a_driver_that_nobody_tells_of_has_no_version(monkeypatch, tmp_path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert driver_version() is None
    smi = tmp_path / "nvidia-smi"
    smi.write_text("#!/bin/sh\necho 570.1.2\necho 570.1.2\n")
    smi.chmod(0o755)
    assert driver_version() == "570.1.2"


def test_lines_are_added_to_a_file_if_there_is_one(tmp_path) -> None:
    path = tmp_path / "lines.jsonl"
    for value in (1, 2):
        common.add_line(path, {"value": value})
    common.add_line(None, {"value": 3})
    assert path.read_text() == '{"value": 1}\n{"value": 2}\n'
