"""The rollout's side: ask an engine, keep what it says of each token.

Also two rollouts that are worse than the trainer on purpose. Weights of few bits are what an engine
is given, already rounded; noise in the choice of experts takes the place of the model's routing
operation. Neither is an option of the engine: nobody wants them but to see what they do.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

import dovetail
from dovetail.layers.moe import SparseMoe
from dovetail.replay.records import RouteTrace
from r3 import arithmetic


@dataclass(frozen=True, slots=True)
class Sample:
    """One answer.

    Attributes:
        number: of the problem.
        prompt, output: token ids.
        logprobs: of the output, in the forward that sampled it.
        trace: the experts of all positions but the last.
        version: of the weights, the same for all tokens.
    """

    number: int
    prompt: list[int]
    output: list[int]
    logprobs: tuple[float, ...]
    trace: RouteTrace
    version: int

    @property
    def tokens(self) -> list[int]:
        return self.prompt + self.output


def sample(
    engine: dovetail.Engine, numbers: Sequence[int], *, per_problem: int, seed: int
) -> list[Sample]:
    """Sample answers at temperature 1, those of a problem one after another.

    The same seed draws with the same noise, so two rollouts differ in nothing but their arithmetic.
    """
    prompts = [arithmetic.problem(number)[0] for number in numbers]
    params = [
        dovetail.SamplingParams(
            max_new_tokens=arithmetic.ANSWER_LEN,
            n=per_problem,
            sampling_seed=(seed << 32) + place,
        )
        for place in range(len(numbers))
    ]
    answers = engine.generate(prompts, params, capture=("experts",))
    of_answer = [number for number in numbers for _ in range(per_problem)]
    return [_sample(number, answer) for number, answer in zip(of_answer, answers, strict=True)]


def _sample(number: int, answer: dovetail.Generation) -> Sample:
    if answer.routes is None:
        raise SystemExit(f"no expert rows came back: {answer.finish_reason}")
    [version] = set(answer.weight_versions)
    return Sample(
        number,
        list(answer.prompt_token_ids),
        list(answer.token_ids),
        answer.logprobs,
        answer.routes,
        version,
    )


# -- weights of few bits -------------------------------------------------------------------------


def rounded(
    named_tensors: Iterable[tuple[str, torch.Tensor]], bits: int
) -> Iterator[tuple[str, torch.Tensor]]:
    """Round the weights of attention and experts to integers of so many bits, and back.

    A scale for each output (int8), or for each 32 inputs of it (int4), as weight-only formats have.
    Embeddings, head, norms and routers stay, as they do there.
    """
    for name, tensor in named_tensors:
        is_rounded = ".experts." in name or ("self_attn" in name and "_proj." in name)
        yield name, _rounded(tensor.detach(), bits) if is_rounded else tensor


def _rounded(weight: torch.Tensor, bits: int) -> torch.Tensor:
    group = weight.shape[-1] if bits >= 8 else 32
    grouped = weight.float().unflatten(-1, (-1, group))
    largest = 2 ** (bits - 1) - 1
    scale = grouped.abs().amax(-1, keepdim=True).clamp(min=1e-12) / largest
    return ((grouped / scale).round().clamp(-largest, largest) * scale).flatten(-2)


# -- noise in the choice ---------------------------------------------------------------------------


class NoisyRouting:
    """The operations of a model's layers, of which one chooses experts with noise.

    Noise is added to the log-probabilities that are ranked; weights come from the clean ones. So
    a trainer that computes through the same experts computes the same, and nothing else differs.
    """

    def __init__(self, kernels: Any, deviation: float, seed: int) -> None:
        self._kernels = kernels
        self._deviation = deviation
        self._generator = torch.Generator().manual_seed(seed)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._kernels, name)

    def route(
        self, logits_TE: torch.Tensor, k: int, norm_topk_prob: bool, *, capture: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if capture is not None:
            raise SystemExit("noisy routing is for the CPU, where rows are kept by the recorder")
        logprobs_TE = torch.log_softmax(logits_TE.float(), dim=-1)
        noise_TE = torch.randn(logprobs_TE.shape, generator=self._generator)
        ids_TK = (logprobs_TE + self._deviation * noise_TE).topk(k).indices
        weights_TK = logprobs_TE.gather(1, ids_TK).exp()
        if norm_topk_prob:
            weights_TK = weights_TK / weights_TK.sum(-1, keepdim=True)
        return weights_TK, ids_TK


def make_noisy(engine: dovetail.Engine, deviation: float, *, seed: int = 0) -> None:
    """Let an idle engine's model choose experts with noise from now on."""
    for module in engine.port._model.modules():  # pyright: ignore[reportPrivateUsage]
        if isinstance(module, SparseMoe):
            module._kernels = NoisyRouting(module._kernels, deviation, seed)  # pyright: ignore
            seed += 1
