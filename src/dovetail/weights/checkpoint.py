"""The tensors of a Hugging Face model folder.

Owns finding and reading ``*.safetensors``: one file, or shards with an index. Opening reads headers
only, so names, shapes and damage are known before anything is copied. Must not know what a tensor
is for.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from safetensors import SafetensorError, safe_open
from torch import Tensor

from dovetail.config.fields import read_json
from dovetail.errors import ConfigError

_SINGLE = "model.safetensors"
_INDEX = "model.safetensors.index.json"
_FLOAT_DTYPES = ("F64", "F32", "F16", "BF16")


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """One tensor as a file's header describes it."""

    file: Path
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """The tensors of a model folder by name; data is read when it is asked for."""

    folder: Path
    stored: dict[str, StoredTensor]

    @staticmethod
    def open(folder: str | Path) -> "Checkpoint":
        """Find the weights of a folder and read their headers.

        Raises:
            ConfigError: there are no weights, a shard is missing or damaged, the index and the
                shards disagree, or a tensor is no plain float tensor.
        """
        folder = Path(folder)
        index_file = folder / _INDEX
        if (folder / _SINGLE).is_file():
            index = None
            files = [folder / _SINGLE]
        elif index_file.is_file():
            index = _read_index(index_file)
            files = sorted({folder / shard for shard in index.values()})
        else:
            raise ConfigError(
                "model",
                f"{folder} has no weights: neither {_SINGLE} nor {_INDEX}; "
                "other formats must be converted to safetensors",
            )
        stored: dict[str, StoredTensor] = {}
        for file in files:
            for name, tensor in _read_header(file):
                if name in stored:
                    raise ConfigError(name, f"is both in {stored[name].file} and in {file}")
                stored[name] = tensor
        for name, shard in (index or {}).items():
            if name not in stored or stored[name].file != folder / shard:
                raise ConfigError(
                    name, f"is not in {folder / shard}, where {index_file.name} says it is"
                )
        return Checkpoint(folder, stored)

    def read(self, names: Iterable[str]) -> Iterator[tuple[str, Tensor]]:
        """Yield tensors, file by file; each is backed by its memory-mapped file."""
        by_file: dict[Path, list[str]] = {}
        for name in names:
            by_file.setdefault(self.stored[name].file, []).append(name)
        for path, names_in_file in by_file.items():
            with safe_open(path, framework="pt") as file:
                for name in names_in_file:
                    yield name, file.get_tensor(name)


def _read_index(file: Path) -> dict[str, str]:
    weight_map = read_json(file).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ConfigError("model", f"{file} has no weight_map; download it again")
    for name, shard in weight_map.items():
        # A plain name: an index must not lead out of the model's folder.
        if not isinstance(shard, str) or shard != Path(shard).name:
            raise ConfigError("model", f"{file} gives {name} no file name but {shard!r}")
    return weight_map


def _read_header(path: Path) -> Iterator[tuple[str, StoredTensor]]:
    if not path.is_file():
        raise ConfigError("model", f"{path} is missing, though {_INDEX} names it; download it")
    try:
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118 (the file is no mapping)
                tensor = file.get_slice(name)
                if tensor.get_dtype() not in _FLOAT_DTYPES:
                    raise ConfigError(
                        name,
                        f"is stored as {tensor.get_dtype()}; supported are "
                        f"{', '.join(_FLOAT_DTYPES)} (quantised weights are not supported)",
                    )
                yield name, StoredTensor(path, tuple(tensor.get_shape()))
    except (SafetensorError, OSError) as error:
        raise ConfigError(
            "model", f"{path} is truncated or damaged ({error}); download it again"
        ) from error
