"""Where a model's folder is found: here, in the hub's cache, or on the hub, which no test asks."""

import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
from huggingface_hub import constants, errors

import dovetail
from dovetail.config.hub import EMBEDDED_MODEL, locate_model
from dovetail.config.resolve import options_from, resolve
from dovetail.errors import ConfigError
from tests.support.processes import environment

NAME = "some-org/Some-Model-0.6B"
COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty hub cache; the tests' environment is offline."""
    assert constants.HF_HUB_OFFLINE
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    return tmp_path


def fetch_with(monkeypatch: pytest.MonkeyPatch, fetch: Any) -> None:
    monkeypatch.setattr(huggingface_hub, "snapshot_download", fetch)


def fail_with(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    def fetch(*_: object, **__: object) -> str:
        raise error

    fetch_with(monkeypatch, fetch)


def test_no_model_is_the_embedded_one() -> None:
    assert locate_model(None) == (EMBEDDED_MODEL, "default: the embedded tiny MoE")


@pytest.mark.parametrize("model", ["/no/such/folder", "./a/b", "../a/b", "a/b/c", "name", "~/a/b"])
def test_what_is_no_name_is_a_folder(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    fail_with(monkeypatch, AssertionError("the hub was asked"))
    folder, reason = locate_model(model)
    assert folder == Path(model).expanduser() and reason == "given"


def test_a_folder_comes_before_a_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fail_with(monkeypatch, AssertionError("the hub was asked"))
    (tmp_path / NAME).mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert locate_model(NAME) == (Path(NAME), "given")


def test_a_name_is_fetched_and_little_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: dict[str, Any] = {}

    def fetch(name: str, **options: Any) -> str:
        asked.update(options, name=name)
        return str(tmp_path)

    fetch_with(monkeypatch, fetch)
    folder, reason = locate_model(NAME)
    assert folder == tmp_path
    assert reason == f"given: {NAME} on the Hugging Face hub"
    assert asked.pop("name") == NAME
    files = [
        "config.json", "model-00001-of-00002.safetensors", "chat_template.jinja", "tokenizer.json",
        "pytorch_model.bin", "model.gguf", "original/params.json", "consolidated.safetensors",
        "onnx/model.safetensors", "README.md", "modeling.py",
    ]  # fmt: skip
    kept = huggingface_hub.utils.filter_repo_objects(files, **asked)
    assert list(kept) == files[:4]


def test_a_missing_package_is_named_with_its_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(ConfigError, match=r"^model: .*pip install huggingface_hub, or"):
        locate_model(NAME)


def test_offline_and_not_in_the_cache(cache: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        dovetail.Engine(NAME)
    message = str(caught.value)
    assert message.startswith(f"model: {NAME} is no folder here")
    assert "give a folder" in message and "unset HF_HUB_OFFLINE" in message
    assert "\n" not in message


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (errors.RepositoryNotFoundError, "none of that name.*correct the name.*give a folder"),
        (errors.GatedRepoError, "consent.*hf auth login.*give a folder"),
        (errors.HfHubHTTPError, r"cannot be fetched .*\(it broke\)"),
    ],
)
def test_what_the_hub_says_becomes_advice(
    kind: Any, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    error = kind.__new__(kind)  # its __init__ wants a response of whichever HTTP library
    Exception.__init__(error, "it broke\nat length")
    fail_with(monkeypatch, error)
    with pytest.raises(ConfigError, match=f"^model: {NAME} .*{message}"):
        locate_model(NAME)


def test_a_model_in_the_cache_runs_offline(cache: Path, llama_folder: Path) -> None:
    """Laid out as the hub's package does: files are links from a snapshot to blobs."""
    repo = cache / ("models--" + NAME.replace("/", "--"))
    snapshot, blobs = repo / "snapshots" / COMMIT, repo / "blobs"
    for folder in (snapshot, blobs, repo / "refs"):
        folder.mkdir(parents=True)
    (repo / "refs" / "main").write_text(COMMIT)
    for number, file in enumerate(sorted(llama_folder.iterdir())):
        shutil.copy(file, blobs / str(number))
        (snapshot / file.name).symlink_to(Path("..", "..", "blobs", str(number)))

    config = resolve(options_from({"model": NAME}))
    assert Path(config.model_folder) == snapshot.resolve()
    assert config.reasons["model_folder"] == f"given: {NAME} on the Hugging Face hub"
    params = dovetail.SamplingParams(temperature=0, max_new_tokens=3, ignore_eos=True)
    with dovetail.Engine(NAME) as by_name, dovetail.Engine(llama_folder) as by_folder:
        [found] = by_name.generate("abc", params)
        [expected] = by_folder.generate("abc", params)
    assert found.token_ids == expected.token_ids and len(found.token_ids) == 3


def test_the_package_is_not_loaded_unless_a_name_is_asked_for() -> None:
    code = (
        "import sys; from dovetail.config.resolve import options_from, resolve\n"
        "resolve(options_from({})); print('huggingface_hub' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        env=environment(),
    )
    assert done.stdout.strip() == "False", done.stderr
