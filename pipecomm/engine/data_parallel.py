"""Defers the reduction of a stage's data-parallel wrappers to the last backward of a step.

DistributedDataParallel, replicate and fully_shard reduce with every backward pass. A step has one
for each microbatch, with several forwards open, and has to reduce their sum once. Knows these
wrappers, nothing of links and schedules.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.distributed._composable.replicate import DDP as ReplicatedByDdp
from torch.distributed._composable.replicate import replicate
from torch.nn.parallel import DistributedDataParallel

from pipecomm.errors import ConfigError

__all__ = ["DeferredReduction", "check_wrappers", "is_wrapped"]


class DeferredReduction:
    """The wrappers in and around `module`, in one training step after another.

    What the user has told them (no_sync, set_requires_gradient_sync and its like) when a step
    begins holds for that step as a whole.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._replicas: list[DistributedDataParallel] = []
        self._shards: list[Any] = []
        # (owner, attribute, the user's value) of what is turned off.
        self._turned: list[tuple[Any, str, Any]] = []
        self._is_reducing = False

    def begin(self) -> None:
        """From here to last_backward() nothing reduces. Raises as check_wrappers()."""
        check_wrappers(self._module)
        self._replicas, self._shards = _find_replicas(self._module), _find_shards(self._module)
        for ddp in self._replicas:
            _check_replica(ddp)
        for owner, attribute, value in _switches(self._replicas, self._shards, self._module):
            self._turned.append((owner, attribute, getattr(owner, attribute)))
            setattr(owner, attribute, value)

    @property
    def searches_graph(self) -> bool:
        """Whether a wrapper looks for the parameters that a backward pass will not come by."""
        return any(ddp.find_unused_parameters for ddp in self._replicas)

    def roots(self, outputs: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Stand-ins for `outputs` in last_backward(): their place in the graph, no memory.

        None where nobody would search the graph for parameters that a step does not use.
        """
        if not self.searches_graph:
            return ()
        return tuple(output[None][:0].clone() for output in outputs)

    @contextmanager
    def last_backward(self, roots: Sequence[Tensor]) -> Iterator[None]:
        """The block is the last backward pass of the step: the reductions happen with it.

        `roots` are those of the same microbatch. Raises RuntimeError where DDP was left without
        a gradient it waits for.
        """
        self._restore()
        self._is_reducing = True
        with ExitStack() as stack:
            for ddp in self._replicas:
                if ddp.require_backward_grad_sync:
                    stack.enter_context(_reducing(ddp, roots))
            yield
        for state in self._shards:
            _reduce_what_is_left(state)
        self._is_reducing = False

    def give_up(self) -> None:
        """The step has ended early, at any moment; the next one starts afresh."""
        self._restore()
        if self._is_reducing:
            for ddp in self._replicas:
                ddp.reducer._reset_state()
        self._is_reducing = False
        for state in self._shards or _find_shards(self._module):
            _start_afresh(state)

    def _restore(self) -> None:
        while self._turned:
            setattr(*self._turned.pop())


def check_wrappers(module: nn.Module) -> None:
    """Raise ConfigError for wrappers that cannot wait for the last backward of a step."""
    for part in module.modules():
        if isinstance(part, _loaded("torch.distributed.fsdp", "FullyShardedDataParallel")):
            raise ConfigError(
                "expected a stage without FullyShardedDataParallel, whose backward passes cannot "
                "follow several forwards; use torch.distributed.fsdp.fully_shard"
            )
        if isinstance(part, DistributedDataParallel):
            _check_replica(part)


def _check_replica(ddp: DistributedDataParallel) -> None:
    for is_set, what, instead in (
        (
            ddp.static_graph,
            "static_graph, which counts backward passes",
            "leave it out; find_unused_parameters=True is possible",
        ),
        (
            bool(ddp._delay_all_reduce_params),
            "delay_all_reduce_named_params, which are reduced with every microbatch",
            "leave them out",
        ),
        (
            ddp._join_config.enable,
            "Join around it, which counts the forward of every microbatch",
            "give every replica the same number of steps",
        ),
    ):
        if is_set:
            raise ConfigError(
                f"expected a stage in DistributedDataParallel without {what}; got one: {instead}"
            )


def is_wrapped(module: nn.Module) -> bool:
    """Whether anything in or around it reduces gradients over replicas or shards."""
    kinds = (DistributedDataParallel, ReplicatedByDdp)
    return any(isinstance(part, kinds) for part in module.modules()) or bool(_find_shards(module))


def _loaded(module: str, name: str) -> Any:
    """A class, for isinstance; nothing can be one while its module, slow to import, is not."""
    return getattr(sys.modules.get(module), name, ())


def _find_replicas(module: nn.Module) -> list[DistributedDataParallel]:
    """Every DistributedDataParallel, also those that replicate() keeps to itself."""
    found = []
    for part in module.modules():
        if isinstance(part, DistributedDataParallel):
            found.append(part)
        elif isinstance(part, ReplicatedByDdp):
            found.append(_replicated(part)._ddp)
    return found


def _replicated(module: nn.Module) -> Any:
    """The state of a module that replicate() has turned into a ReplicatedByDdp, ready for use."""
    state = replicate.state(module)
    if not state.has_initialized:
        state.lazy_init()
    # As its forward does, from what the user has set.
    state._ddp.require_backward_grad_sync = not state._no_sync
    return state


@contextmanager
def _reducing(ddp: DistributedDataParallel, roots: Sequence[Tensor]) -> Iterator[None]:
    """The block is a backward pass from `roots`, with which DDP reduces what is in every .grad."""
    parameters: Iterator[nn.Parameter] = ddp._get_data_parallel_params(ddp.module)  # type: ignore[no-untyped-call]
    nodes = {p: get_gradient_edge(p).node for p in parameters if p.requires_grad}
    arrived: set[nn.Parameter] = set()
    hooks = [
        node.register_hook(lambda *_, p=parameter: arrived.add(p))
        for parameter, node in nodes.items()
    ]
    # What DDP's own forward does, when the next backward is the one to reduce.
    ddp.reducer.prepare_for_forward()
    ddp.reducer.prepare_for_backward(list(roots))
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
    _announce(ddp, [p for p in nodes if p not in arrived and p.grad is not None], arrived)
    ddp._check_reducer_finalized()  # type: ignore[no-untyped-call]
    # As after a forward that DDP is to reduce: buffers are broadcast once in the next step.
    ddp.require_forward_param_sync = True


def _announce(
    ddp: DistributedDataParallel, missed: Sequence[nn.Parameter], arrived: set[nn.Parameter]
) -> None:
    """Tell DDP of gradients that only earlier microbatches have: it waits for every parameter."""
    if arrived and ddp.find_unused_parameters:
        return
    views = [parameter.view_as(parameter) for parameter in missed]
    if not arrived:
        # Without any hook of the last backward it has not even looked for unused ones.
        ddp.reducer.prepare_for_backward(views)
    if views:
        torch.autograd.backward(views, [torch.zeros_like(view) for view in views])
    elif not arrived:
        # A step without it. The next one's first backward would be taken for the last.
        ddp.reducer._reset_state()


def _find_shards(module: nn.Module) -> list[Any]:
    """The state of each fully_shard, and of each replicate built on it, once."""
    kind = _loaded("torch.distributed.fsdp", "FSDPModule")
    states = (part._get_fsdp_state() for part in module.modules() if isinstance(part, kind))
    return list(dict.fromkeys(states))


def _switches(
    replicas: Sequence[DistributedDataParallel], shards: Sequence[Any], module: nn.Module
) -> Iterator[tuple[Any, str, Any]]:
    """(owner, attribute, value) of all that has to be set for nothing to reduce."""
    for part in module.modules():
        if isinstance(part, ReplicatedByDdp):
            yield replicate.state(part), "_no_sync", True
    for ddp in replicas:
        yield ddp, "require_backward_grad_sync", False
    for state in shards:
        yield state._state_ctx, "is_last_backward", False
        for group in state._fsdp_param_groups:
            yield group, "reduce_grads", False
            yield group, "reshard_after_backward", False


def _reduce_what_is_left(state: Any) -> None:
    """Reduce gradients of earlier microbatches that the last backward has not come by."""
    if state._is_root:
        for part in state._state_ctx.all_states:
            for group in part._fsdp_param_groups:
                group.post_backward()
        state._root_post_backward_final_callback()


def _start_afresh(state: Any) -> None:
    if state._is_root:
        state._reset_iter_state()
    for group in state._fsdp_param_groups:
        for parameter in group.fsdp_params:
            # Not reachable for the user, whose zero_grad() clears the shards.
            parameter.unsharded_accumulated_grad = None
            if hasattr(parameter, "_unsharded_param"):
                parameter._unsharded_param.grad = None
