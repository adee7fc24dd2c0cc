"""A stepped engine for a model folder: see ``stepper``, which this gives a real executor."""

from collections.abc import Callable
from functools import lru_cache
from pathlib import Path

import torch

from dovetail.config.resolve import options_from, resolve
from dovetail.config.schema import EngineConfig
from dovetail.dist.comm import LocalComm
from dovetail.exec.device import CpuDevice, Device
from dovetail.exec.executor import Executor
from dovetail.exec.pending import StepExecutor
from dovetail.exec.runner import StepRunner
from dovetail.models.decoder import DecoderLM
from dovetail.models.registry import build_model
from dovetail.text.tokenizer import Tokenizer
from dovetail.weights.load import load_weights
from tests.support.stepper import Output, Stepper

__all__ = ["Harness", "Output", "load_model", "load_tokenizer", "make_config"]


@lru_cache(maxsize=16)
def load_model(folder: Path, dtype: str) -> DecoderLM:
    """Load a model once for all tests; nobody writes its weights."""
    config = resolve(options_from({"model": str(folder), "dtype": dtype})).model
    model = build_model(config, dtype=getattr(torch, dtype), device="cpu", comm=LocalComm())
    load_weights(model, folder, comm=LocalComm(), on_progress=None)
    return model


@lru_cache(maxsize=16)
def load_tokenizer(folder: Path) -> Tokenizer:
    """Load a tokenizer once for all tests."""
    return Tokenizer.from_folder(folder)


def make_config(folder: Path, **options: object) -> EngineConfig:
    """Return the decided configuration of a model folder."""
    return resolve(options_from({"model": str(folder), **options}))


class Harness(Stepper):
    """A stepper whose executor runs the folder's model, unless the test makes another."""

    def __init__(
        self,
        folder: Path,
        *,
        device: Device | None = None,
        make_executor: Callable[[EngineConfig], StepExecutor] | None = None,
        **options: object,
    ) -> None:
        config = make_config(folder, **options)
        self.tokenizer = load_tokenizer(folder)
        if make_executor is None:
            model = load_model(folder, config.dtype)
            device = device or CpuDevice()
            executor: StepExecutor = Executor(config, StepRunner(config, model, device), device)
        else:
            executor = make_executor(config)
        super().__init__(
            config,
            executor,
            token_bytes=self.tokenizer.token_bytes,
            special_ids=self.tokenizer.special_ids,
        )
