"""Where a model's files are: the embedded one, a folder, or a name on the Hugging Face hub.

Owns the one import of ``huggingface_hub``, an optional package: it is loaded when a name is asked
for, and never else. What is fetched lands in that package's cache and is found there again without
a network. Must not know what the files hold.
"""

import re
from pathlib import Path

from dovetail.errors import ConfigError

EMBEDDED_MODEL = Path(__file__).parents[1] / "assets" / "tiny-moe"
HUB_INSTALL = "pip install huggingface_hub"
FETCHED_PATTERNS = ("*.safetensors", "*.json", "*.jinja", "tokenizer*")
IGNORED_PATTERNS = ("*/*", "consolidated*")
"""Folders and Mistral's own format hold the same weights a second time."""

_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


def locate_model(model: str | None) -> tuple[Path, str]:
    """Return the folder of a model, and who decided that it is this one.

    Args:
        model: a folder, a name on the hub such as ``Qwen/Qwen3-0.6B``, or None for the embedded
            model. An existing folder comes before a name that reads the same.

    Raises:
        ConfigError: the name needs ``huggingface_hub`` and it is not installed, or the model
            cannot be fetched and is not in the cache.
    """
    if model is None:  # an empty name, as an unset shell variable gives, is a mistake
        return EMBEDDED_MODEL, "default: the embedded tiny MoE"
    folder = Path(model).expanduser()
    if folder.exists() or _HUB_NAME.fullmatch(model) is None:
        return folder, "given"
    return _fetch(model), f"given: {model} on the Hugging Face hub"


def _fetch(name: str) -> Path:
    try:
        from huggingface_hub import (
            snapshot_download,  # pyright: ignore[reportUnknownVariableType]
        )
    except ImportError:
        raise ConfigError(
            "model",
            f"{name} is no folder here, and looking it up on the Hugging Face hub needs the "
            f"package huggingface_hub: {HUB_INSTALL}, or give a folder",
        ) from None
    try:
        folder = snapshot_download(
            name, allow_patterns=list(FETCHED_PATTERNS), ignore_patterns=list(IGNORED_PATTERNS)
        )
    except Exception as error:  # that package's errors, and those of its HTTP library, whichever
        raise ConfigError("model", _what_to_do(name, error)) from error
    return Path(folder)


def _what_to_do(name: str, error: Exception) -> str:
    """Return one sentence about a failed look-up and one about its mending."""
    kinds = {kind.__name__ for kind in type(error).__mro__}
    start = f"{name} is no folder here, and "
    if "GatedRepoError" in kinds:
        return (
            start + "on the Hugging Face hub its authors ask for consent first; "
            "agree on its page and run `hf auth login`, or give a folder"
        )
    if "RepositoryNotFoundError" in kinds:
        return (
            start + "the Hugging Face hub has none of that name, or does not show it to you; "
            "correct the name, run `hf auth login` for a private one, or give a folder"
        )
    first_line = (str(error).strip() or type(error).__name__).splitlines()[0]
    return (
        start + f"it cannot be fetched from the Hugging Face hub ({first_line}) nor is it whole in "
        "the cache; give a folder, or go online and unset HF_HUB_OFFLINE if it is set"
    )
