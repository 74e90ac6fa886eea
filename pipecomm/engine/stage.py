"""One stage: runs its module forward and backward and holds what a microbatch needs in between.

Knows nothing of other ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from pipecomm.addressable import ADVICE, why_not_addressable
from pipecomm.device import device_of
from pipecomm.engine.backward import Backward
from pipecomm.engine.data_parallel import DeferredReduction
from pipecomm.engine.split_backward import OpenBackward, SplitBackward

__all__ = ["Head", "Stage", "as_received", "boundary_tensors"]

# What the last stage does with its module's output: (microbatch, output) -> weighted loss, if any.
Head = Callable[[int, Any], "Tensor | None"]

# Has torch's text for it, as the unsplit model would raise it.
_NOTHING_TO_TRAIN = (
    "expected a loss that requires a gradient; got one that does not require grad and does not "
    "have a grad_fn. Is it, or what it is made from, detached or computed without autograd, or is "
    "every parameter frozen? A microbatch with nothing to learn from has output.sum() * 0 as loss"
)


class Stage:
    """`module` as stage `index` of `num_stages`; `device`: where its inputs are put, if named.

    The stages of a rank have one `open_backward`.
    """

    def __init__(
        self,
        module: nn.Module,
        index: int,
        num_stages: int,
        device: torch.device | None = None,
        open_backward: OpenBackward | None = None,
    ) -> None:
        self.module = module
        self.index = index
        self.num_stages = num_stages
        self._device = device
        # By microbatch, with what DeferredReduction.roots gave for its outputs.
        self._backwards: dict[int, tuple[Backward, tuple[Tensor, ...]]] = {}
        self._reduction = DeferredReduction(module)
        self._split = SplitBackward(module, f"stage {index} of {num_stages}", open_backward)
        self._splits = False

    @property
    def is_first(self) -> bool:
        return self.index == 0

    @property
    def is_last(self) -> bool:
        return self.index == self.num_stages - 1

    @property
    def device(self) -> torch.device:
        """Where its inputs are put: as named, or where the module lies now."""
        return self._device or device_of(self.module)

    @contextmanager
    def step(self, *, trains: bool, splits: bool = False) -> Iterator[None]:
        """Around the forwards and backwards of one step, which may be in parts if it `splits`.

        Whatever the block raises, nothing of it is left over for the next step.
        """
        if trains:
            self._reduction.begin()
        self._splits = splits
        try:
            if splits:
                self._split.begin()
            yield
        except BaseException:
            self._reduction.give_up()
            raise
        finally:
            self.forget()

    def forward(
        self,
        microbatch: int,
        inputs: Sequence[Any],
        kwargs: Mapping[str, Any],
        head: Head,
        *,
        keeps: bool,
    ) -> tuple[Tensor, ...]:
        """Run the module; return the tensors for the next stage, none on the last.

        Runs with autograd, and keeps what backward() needs, if it `keeps`; whatever torch's grad
        mode is. Raises TypeError for an output that cannot travel, RuntimeError for a loss that
        no backward pass can start from.
        """
        with torch.set_grad_enabled(keeps):
            output = self.module(*inputs, **kwargs)
            if self.is_last:
                loss = head(microbatch, output)
                results: tuple[Tensor, ...] = () if loss is None else (loss,)
            else:
                results = boundary_tensors(output, self.index)
            if keeps:
                self._keep(microbatch, () if self.is_first else inputs, results)
        if self.is_last:
            return ()
        return results if keeps else tuple(tensor.detach() for tensor in results)

    def _keep(self, microbatch: int, received: Sequence[Tensor], results: Sequence[Tensor]) -> None:
        if self.is_last and not any(loss.requires_grad for loss in results):
            raise RuntimeError(_NOTHING_TO_TRAIN)
        roots = self._reduction.roots([tensor for tensor in results if tensor.requires_grad])
        self._backwards[microbatch] = Backward.between(received, results), roots

    def num_gradients(self, microbatch: int) -> int:
        """How many gradients the next stage will send; 0 as long as the forward has not run."""
        if self.is_last or microbatch not in self._backwards:
            return 0
        return len(self._backwards[microbatch][0].edges)

    def backward(
        self, microbatch: int, gradients: Sequence[Tensor | None], *, reduces: bool = False
    ) -> tuple[Tensor | None, ...]:
        """Run the backward pass; return a gradient, or None, for each input that requires one.

        `gradients` has one entry per output that requires a gradient; on the last stage one, that
        of the loss. With the pass that `reduces`, the last one of a step, data-parallel wrappers
        reduce.
        """
        if self._splits:
            results = self.backward_inputs(microbatch, gradients)
            self.backward_weights(microbatch, reduces=reduces)
            return results
        backward, roots = self._backwards.pop(microbatch)
        with (
            torch.enable_grad(),
            self._reduction.last_backward(roots) if reduces else nullcontext(),
        ):
            return backward.run(gradients)

    def backward_inputs(
        self, microbatch: int, gradients: Sequence[Tensor | None]
    ) -> tuple[Tensor | None, ...]:
        """The first part of backward(), in a step that splits: all but weights that can wait."""
        backward, _ = self._backwards.pop(microbatch)
        with torch.enable_grad(), self._split.keeping(microbatch):
            return backward.run(gradients)

    def backward_weights(self, microbatch: int, *, reduces: bool = False) -> None:
        """The second part: gradients of the weights that have waited."""
        if not reduces:
            self._split.finish(microbatch)
        elif self._reduction.searches_graph:
            # In no graph are the weights that have waited: the search would find them unused.
            self._split.finish(microbatch)
            with self._reduction.last_backward(()):
                pass
        else:
            with self._reduction.last_backward(()):
                self._split.finish(microbatch)

    def forget(self) -> None:
        """Drop whatever is left of unfinished microbatches."""
        self._backwards.clear()
        self._split.end()


def as_received(tensors: Sequence[Tensor | None], device: torch.device) -> list[Tensor | None]:
    """What a stage makes as the next stage of the same rank takes it: as from a link, not copied.

    Leaves on `device`, with the memory and requires_grad of `tensors`: autograd ends between
    stages wherever they are.
    """
    return [
        None if one is None else one.detach().to(device).requires_grad_(one.requires_grad)
        for one in tensors
    ]


def boundary_tensors(output: Any, stage_index: int) -> tuple[Tensor, ...]:
    """A stage's output as the tuple of tensors that travels; TypeError for anything else."""
    items = output if isinstance(output, (tuple, list)) else (output,)
    if not items:
        raise TypeError(_refusal(stage_index, "nothing"))
    for position, item in enumerate(items):
        where = "" if items is not output else f" at position {position}"
        if not isinstance(item, Tensor):
            raise TypeError(_refusal(stage_index, f"{type(item).__name__}{where}"))
        refused = why_not_addressable(item)
        if refused is not None:
            raise TypeError(_refusal(stage_index, f"{refused}{where}"))
    return tuple(items)


def _refusal(stage_index: int, got: str) -> str:
    return (
        f"expected a tensor or a tuple of tensors from stage {stage_index}; got {got}. Only dense "
        f"tensors travel between stages: {ADVICE}; or pass the value to every stage with kwargs"
    )
