# pyright: strict
"""Finding a model's routers, by watching one small forward.

Owns the probe and what it found: which modules issue the top-k over experts, in which layer, and
the modules around them. A router is a module whose own ``forward`` selects some of the experts of
each token by one top-k of two axes; names of classes or attributes play no part. What does not fit
is refused by name, because a model that is replayed in part is a model that nobody defined.

Must not know traces.
"""

import re
from collections.abc import Callable, Generator, Iterable, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from dovetail.replay.errors import ReplayError, kind_of
from dovetail.replay.topk import Selection, topk_call

_K_NAMES = ("num_experts_per_tok", "num_experts_per_token", "top_k_experts", "moe_topk")


@dataclass(frozen=True, slots=True)
class Router:
    """A module that selects experts.

    Attributes:
        name: its path in the model.
        module: whose ``forward`` selects.
        layer_id: decoder index of its layer. Where layers have several routers (JetMoE), the
            router's place in the order of a forward.
        selection: from how many experts, and groups.
        around: modules whose ``forward`` runs around it, outermost first.
    """

    name: str
    module: nn.Module
    layer_id: int
    selection: Selection
    around: tuple[nn.Module, ...]


@dataclass(frozen=True, slots=True)
class Routers:
    """The routers of a model in the order of its forward.

    Attributes:
        routers: at least one; they agree about the number of experts and of those selected.
        ancestors: modules whose ``forward`` ran around every router: the model, outermost first.
    """

    routers: tuple[Router, ...]
    ancestors: tuple[nn.Module, ...]

    @property
    def layer_ids(self) -> tuple[int, ...]:
        """See ``Router.layer_id``."""
        return tuple(router.layer_id for router in self.routers)


@dataclass(slots=True)
class _Sighting:
    """Calls of top-k by one module."""

    stack: tuple[nn.Module, ...]  # the module last
    calls: list[tuple[tuple[int, ...], int]] = field(
        default_factory=list[tuple[tuple[int, ...], int]]
    )  # shape, k


def find_routers(model: nn.Module, probe: Callable[[], object] | None = None) -> Routers:
    """Run one small forward and return the routers that it went through.

    Runs without gradients and in eval mode, and leaves the model as it was.

    Args:
        model: a Hugging Face causal language model, or any module with routers.
        probe: runs a forward of a few tokens; None calls ``model(input_ids=...)`` with five.

    Raises:
        ReplayError: the model is no module, dense, compiled, has routers without a top-k, or
            routers that do not agree.
    """
    _expect_module(model)
    _refuse_compiled(model)
    watch = _Watch()
    with watch.watching(model), _evaluating(model), torch.no_grad():
        (probe or (lambda: _small_forward(model)))()
    names = {module: name for name, module in _named(model)}
    found = _candidates(watch.sightings, names)
    if not found:
        _refuse_without_routers(model)
    _expect_agreement(found, names)
    _expect_configured(model, found)
    routers = _numbered(found, names)
    return Routers(routers, _common([router.around for router in routers]))


# -- the probe ---------------------------------------------------------------------------------


class _Watch(TorchFunctionMode):
    """Who calls top-k, in a forward under way."""

    def __init__(self) -> None:
        super().__init__()
        self.sightings: dict[nn.Module, _Sighting] = {}
        self._stack: list[nn.Module] = []

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        call = topk_call(func, args, kwargs)
        if call is not None and self._stack:
            module = self._stack[-1]
            sighting = self.sightings.setdefault(module, _Sighting(tuple(self._stack)))
            sighting.calls.append((tuple(call.scores.shape), call.k))
        return func(*args, **kwargs)

    @contextmanager
    def watching(self, model: nn.Module) -> Generator[None]:
        def push(module: nn.Module, _: object) -> None:
            self._stack.append(module)

        def pop(module: nn.Module, _: object, __: object) -> None:
            self._stack.pop()

        with ExitStack() as stack:
            for module in model.modules():
                before = module.register_forward_pre_hook(push)
                stack.callback(before.remove)
                after = module.register_forward_hook(pop, always_call=True)
                stack.callback(after.remove)
            stack.enter_context(self)
            yield


@contextmanager
def _evaluating(model: nn.Module) -> Generator[None]:
    was_training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        yield
    finally:
        for module in was_training:
            module.training = True


def _small_forward(model: nn.Module) -> object:
    device = next((parameter.device for parameter in model.parameters()), None)
    return model(input_ids=torch.arange(5, device=device)[None], use_cache=False)


def _named(model: nn.Module) -> Iterable[tuple[str, nn.Module]]:
    return cast(Iterable[tuple[str, nn.Module]], model.named_modules())


# -- what was seen -------------------------------------------------------------------------------


def _candidates(
    sightings: Mapping[nn.Module, _Sighting], names: Mapping[nn.Module, str]
) -> list[tuple[_Sighting, Selection]]:
    """Return the modules that are routers: those whose last top-k is of two axes."""
    found = [sighting for sighting in sightings.values() if len(sighting.calls[-1][0]) == 2]
    # A module around a router (a balance loss in the model's own forward) is none itself.
    around = {module for sighting in found for module in sighting.stack[:-1]}
    routers = [sighting for sighting in found if sighting.stack[-1] not in around]
    return [(router, _selection(router, names[router.stack[-1]])) for router in routers]


def _selection(sighting: _Sighting, name: str) -> Selection:
    """Return what a router selects from: its last top-k, and that of groups before it."""
    two_axes = [(shape[1], k) for shape, k in sighting.calls if len(shape) == 2]
    *earlier, (num_experts, num_selected) = two_axes
    groups = [width for width, _ in earlier if width < num_experts and num_experts % width == 0]
    if len(groups) != len(earlier) or len(groups) > 1:
        raise ReplayError(
            f"{name} calls top-k {len(two_axes)} times in one forward, over {two_axes} "
            "(width, k), which is no choice of groups and then experts"
        )
    return Selection(num_experts, num_selected, groups[0] if groups else None)


def _expect_agreement(
    found: list[tuple[_Sighting, Selection]], names: Mapping[nn.Module, str]
) -> None:
    kinds = {(selection.num_experts, selection.num_selected) for _, selection in found}
    if len(kinds) > 1:
        each = ", ".join(
            f"{names[sighting.stack[-1]]} {selection.num_selected} of {selection.num_experts}"
            for sighting, selection in found
        )
        raise ReplayError(f"the routers select from different numbers of experts: {each}")


def _expect_configured(model: nn.Module, found: list[tuple[_Sighting, Selection]]) -> None:
    """Compare with the config, where it has a name that is known."""
    config = getattr(model, "config", None)
    config = getattr(config, "text_config", None) or config
    want = next((n for name in _K_NAMES if (n := getattr(config, name, None)) is not None), None)
    is_single = isinstance(want, int)
    if is_single and want != (seen := found[0][1].num_selected):
        raise ReplayError(f"the routers select {seen} experts of a token, the config says {want}")


def _numbered(
    found: list[tuple[_Sighting, Selection]], names: Mapping[nn.Module, str]
) -> tuple[Router, ...]:
    layer_ids: list[int] = []
    for place, (sighting, _) in enumerate(found):
        number = re.search(r"(?:^|\.)(\d+)(?:\.|$)", names[sighting.stack[-1]])
        layer_ids.append(int(number[1]) if number else place)
    if len(set(layer_ids)) < len(layer_ids):  # several routers in a layer
        layer_ids = list(range(len(found)))
    if layer_ids != sorted(layer_ids):
        raise ReplayError(f"the routers of the layers {layer_ids} do not run in this order")
    return tuple(
        Router(
            names[sighting.stack[-1]],
            sighting.stack[-1],
            layer_id,
            selection,
            sighting.stack[:-1],
        )
        for layer_id, (sighting, selection) in zip(layer_ids, found, strict=True)
    )


def _common(stacks: list[tuple[nn.Module, ...]]) -> tuple[nn.Module, ...]:
    depth = 0
    while all(depth < len(stack) and stack[depth] is stacks[0][depth] for stack in stacks):
        depth += 1
    return stacks[0][:depth]


# -- refusals ------------------------------------------------------------------------------------


def _expect_module(model: object) -> None:
    if not isinstance(model, nn.Module):
        raise ReplayError(
            f"model is {kind_of(model)}; give the module, such as "
            "AutoModelForCausalLM.from_pretrained(...) returns"
        )


def _refuse_compiled(model: nn.Module) -> None:
    for name, module in _named(model):
        is_compiled = getattr(module, "_compiled_call_impl", None) is not None
        if is_compiled or hasattr(module, "_orig_mod"):
            raise ReplayError(
                f"{name or 'the model'} is compiled, and a compiled router cannot be watched: "
                "make the session with the model before torch.compile, and leave its routers out"
            )


def _refuse_without_routers(model: nn.Module) -> None:
    config: Any = getattr(model, "config", None)
    kind = getattr(config, "model_type", type(model).__name__)
    blocks = [name for name, _ in _named(model) if name.rpartition(".")[2] == "experts"]
    if blocks:
        raise ReplayError(
            f"{kind} has experts ({blocks[0]}) but selects them without a top-k over [tokens, "
            "experts], as PhiMoE, Zaya, Switch and NLLB do; there is nothing to answer"
        )
    raise ReplayError(f"{kind} is dense: no module selects experts, so there is nothing to replay")
