"""Splits a stage's backward: the gradients of its inputs first (I), those of its weights later (W).

Linear, convolution and embedding layers wait; whatever else has weights is computed with I, as in
a whole backward. So I needs no second walk over the graph and lets go of it: from I to W only the
inputs of the layers that wait, and the gradients of their outputs, are kept.
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from pipecomm.engine.late_layers import KeptCall, LateCall, LateLayer, late_layer

__all__ = ["OpenBackward", "SplitBackward"]

# Weight gradients that may exist at a time before they are added to .grad.
_MAX_PENDING_NBYTES = 64 << 20
# Names of parameters in a warning.
_MAX_NAMES = 3


class OpenBackward:
    """Where the calls of the backward pass at work are kept: one for all stages of a rank.

    Of a layer that two of them share, either may run the backward.
    """

    def __init__(self) -> None:
        self.calls: list[KeptCall] | None = None

    def keep(self, call: KeptCall) -> None:
        # None in a backward pass of the module's own, for its inputs: it asks for no weights.
        if self.calls is not None:
            self.calls.append(call)


class SplitBackward:
    """For `module`, called `name` in warnings, in one training step after another.

    Stages that share layers share `open_backward`, and begin and end together.
    """

    def __init__(
        self, module: nn.Module, name: str, open_backward: OpenBackward | None = None
    ) -> None:
        self._module = module
        self._name = name
        self._forwards: dict[nn.Module, Callable[..., Any]] = {}
        self._changed: list[nn.Module] = []
        self._anchor = torch.zeros((), requires_grad=True)
        self._kept: dict[int, list[KeptCall]] = {}
        self._open = open_backward or OpenBackward()
        self._edges: dict[nn.Parameter, GradientEdge] = {}
        self._is_reported = False

    def begin(self) -> None:
        """From here to end() the layers that can wait do."""
        if _is_sharded(self._module):
            return
        for part in _interpreted(self._module):
            layer = late_layer(part)
            if layer is not None:
                # The same function in every step, or whoever traces it traces it again.
                forward = self._forwards.setdefault(part, self._forward_of(layer))
                # On the instance: __call__ with its hooks stays what it is.
                part.forward = forward
                self._changed.append(part)

    def end(self) -> None:
        """The module is as it was, and whatever has not been finished is dropped. Idempotent."""
        while self._changed:
            del self._changed.pop().forward
        self._kept.clear()
        self._edges.clear()
        self._open.calls = None

    @contextmanager
    def keeping(self, microbatch: int) -> Iterator[None]:
        """The block is the backward pass of `microbatch` whose weight gradients finish() makes."""
        self._open.calls = self._kept.setdefault(microbatch, [])
        try:
            yield
        finally:
            self._open.calls = None

    def finish(self, microbatch: int) -> None:
        """Add to .grad what the weights get from `microbatch`, by autograd: with all its hooks."""
        calls = self._kept.pop(microbatch)
        self._report(calls)
        uses = Counter(call.layer.parameters[0] for call in calls)
        pending: list[tuple[nn.Parameter, Tensor]] = []
        # A weight of several layers gets their sum at once, as in a whole backward.
        of_shared: list[tuple[nn.Parameter, Tensor]] = []
        nbytes = 0
        calls.reverse()
        while calls:
            call = calls.pop()
            is_shared = uses[call.layer.parameters[0]] > 1
            for pair in call.gradients():
                (of_shared if is_shared else pending).append(pair)
                nbytes += 0 if is_shared else pair[1].nbytes
            if nbytes >= _MAX_PENDING_NBYTES:
                self._accumulate(pending)
                nbytes = 0
        self._accumulate(pending + of_shared)

    def _forward_of(self, layer: LateLayer) -> Callable[[Tensor], Tensor]:
        plain = layer.module.forward

        def forward(x: Tensor, *args: Any, **kwargs: Any) -> Any:
            if args or kwargs or not _is_plain_call(layer, x):
                return plain(x, *args, **kwargs)
            x = _as_autocast(layer, x)
            anchor = None if x.requires_grad else self._anchor
            return LateCall.apply(x, anchor, layer, self._open.keep)  # type: ignore[no-untyped-call]

        return forward

    def _accumulate(self, pairs: list[tuple[nn.Parameter, Tensor]]) -> None:
        if pairs:
            edges = [self._edge_of(parameter) for parameter, _ in pairs]
            torch.autograd.backward(edges, [gradient for _, gradient in pairs])
        pairs.clear()

    def _edge_of(self, parameter: nn.Parameter) -> GradientEdge:
        edge = self._edges.get(parameter)
        if edge is None:
            with torch.enable_grad():
                edge = self._edges[parameter] = get_gradient_edge(parameter)
        return edge

    def _report(self, calls: list[KeptCall]) -> None:
        """Warn, once, where W has less than half of the weights."""
        if self._is_reported:
            return
        self._is_reported = True
        late = {p for call in calls for p in call.layer.module.parameters(recurse=False)}
        named = {name: p for name, p in self._module.named_parameters() if p.requires_grad}
        early = [name for name, parameter in named.items() if parameter not in late]
        total = sum(p.numel() for p in named.values())
        num_early = sum(named[name].numel() for name in early)
        if 2 * num_early <= total:
            return
        names = ", ".join(early[:_MAX_NAMES]) + (", ..." if len(early) > _MAX_NAMES else "")
        warnings.warn(
            f"{self._name}: the gradients of {num_early} of {total} weights ({names}) are computed "
            f"with the inputs' (I), so that W has little to do, because {_why(self._module)}",
            stacklevel=2,
        )


def _is_plain_call(layer: LateLayer, x: Any) -> bool:
    weight, bias = layer.parameters
    return (
        torch.is_grad_enabled()
        and type(x) in (Tensor, nn.Parameter)
        # Not what a parametrization or functional_call puts there.
        and type(weight) is nn.Parameter
        and weight.requires_grad
        and (bias is None or (type(bias) is nn.Parameter and bias.requires_grad))
        and x.layout is torch.strided
        and not weight.is_complex()
        and not torch.compiler.is_compiling()
        and not torch._C._are_functorch_transforms_active()
        and layer.takes(x)
    )


def _as_autocast(layer: LateLayer, x: Tensor) -> Tensor:
    """x as autocast would give it to the layer, with the cast in the graph."""
    kind, wide = x.device.type, torch.float64
    if not torch.is_autocast_enabled(kind) or not x.is_floating_point():
        return x
    if wide in (x.dtype, layer.parameters[0].dtype):
        return x
    return x.to(torch.get_autocast_dtype(kind))


def _interpreted(module: nn.Module) -> Iterator[nn.Module]:
    """Its modules, without those that torch.compile runs."""
    if not _is_compiled(module):
        yield module
        for child in module.children():
            yield from _interpreted(child)


def _is_sharded(module: nn.Module) -> bool:
    """Whether fully_shard, or replicate on it, is around any of it: its parameters come and go."""
    return any(hasattr(part, "_get_fsdp_state") for part in module.modules())


def _is_compiled(module: nn.Module) -> bool:
    return hasattr(module, "_orig_mod") or module._compiled_call_impl is not None


def _why(module: nn.Module) -> str:
    if _is_sharded(module):
        return "fully_shard gathers and frees them with the backward of the inputs"
    if any(_is_compiled(part) for part in module.modules()):
        return "torch.compile makes one backward of both"
    return (
        "they are not those of Linear, Conv1d to Conv3d or Embedding layers, called as modules: "
        "weights used by functions, by subclasses with a forward of their own or through a "
        "parametrization do not wait"
    )
