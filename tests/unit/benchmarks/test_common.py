"""What every benchmark line says of its run."""

import torch

import dovetail
from benchmarks import common


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
