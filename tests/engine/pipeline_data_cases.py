"""Cases of what a step is given, and of how tensors lie in memory between stages."""

from __future__ import annotations

import copy
from collections import OrderedDict, UserDict
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, init_device_mesh

import pipecomm
from pipecomm.codecs.policy import CodecPolicy
from pipecomm.engine.pipeline import Pipeline
from tests.engine.pipeline_cases import (
    TIMEOUT_S,
    WIDTH,
    Batch,
    mse,
    relative_error,
    rows,
    whole_model,
    worst_error,
)
from tests.engine.pipeline_error_cases import Outcome, outcome_of
from tests.odd_tensors import Doubled


class Tokens(UserDict[str, Any]):
    """A mapping that only its own class knows, as tokenizers return it."""


class Named(NamedTuple):
    x: Tensor
    scale: Tensor


class TakesMapping(nn.Module):
    """Reads its input out of a container; the later stage gets a plain tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.seen: list[int] = []

    def forward(self, given: Any, scale: Tensor | None = None, **kwargs: Any) -> Tensor:
        x = given if isinstance(given, Tensor) else given["x"]
        self.seen.append(len(x))
        factor = kwargs["more"]["factor"] if "more" in kwargs else 1.0
        return self.linear(x).tanh() * factor * (1.0 if scale is None else scale)


def summed_error(output: Tensor, target: Any) -> Tensor:
    return (output - target["y"]).square().sum()


def containers_as_data(rank: int, size: int) -> dict[str, tuple[float, set[int]]]:
    """With summed losses, which a part that is not split multiplies: the worst error, and the
    rows that a microbatch had, by container."""
    x, factor, y = rows(8), rows(8, seed=5, shape=(1,)), rows(8, seed=2)
    given: dict[str, Batch] = {
        "OrderedDict": Batch(
            OrderedDict(x=x), OrderedDict(y=y), {"more": OrderedDict(factor=factor)}
        ),
        "UserDict": Batch(Tokens(x=x), Tokens(y=y), {"more": Tokens(factor=factor)}),
        "namedtuple": Batch(Named(x, factor), {"y": y}),
        "nested": Batch(({"x": x},), Tokens(y=y), {"more": {"factor": factor}}),
    }
    found = {}
    for name, batch in given.items():
        torch.manual_seed(0)
        stages = [TakesMapping() for _ in range(size)]
        options = {"num_microbatches": 4, "loss_reduction": "sum", "loss_fn": summed_error}
        worst = worst_error(rank, stages, [batch, batch], **options)
        found[name] = (worst, set(stages[rank].seen))
    return found


def containers_in_evaluation(rank: int, size: int) -> dict[str, Any]:
    torch.manual_seed(0)
    stages = [TakesMapping() for _ in range(size)]
    x, y = rows(8), rows(8, seed=2)
    loss_fn, sums = summed_error, {"loss_reduction": "sum", "timeout_s": TIMEOUT_S}
    with Pipeline(stages[rank], num_microbatches=2, loss_fn=loss_fn, **sums) as pipeline:
        result = pipeline.eval_step(
            Tokens(x=x), Tokens(y=y), num_microbatches=4, return_outputs=True
        )
    if result.outputs is None:
        return {}
    with torch.no_grad():
        expected = stages[1](stages[0](x))
        loss = summed_error(expected, {"y": y})
    assert result.loss is not None
    return {
        "output": relative_error(torch.cat(result.outputs), expected),
        "loss": abs(result.loss - loss.item()) / loss.item(),
    }


class AddTable(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, table: Tensor) -> Tensor:
        return self.linear(x) @ table


class UnwrapTable(nn.Module):
    """The unsplit model is given the mark itself."""

    def __init__(self, stage: nn.Module) -> None:
        super().__init__()
        self.stage = stage

    def forward(self, x: Tensor, table: Any) -> Tensor:
        marked = isinstance(table, pipecomm.ForEveryMicrobatch)
        result: Tensor = self.stage(x, table.value if marked else table)
        return result


def marked_table(rank: int, size: int) -> float:
    torch.manual_seed(0)
    stages: list[nn.Module] = [UnwrapTable(AddTable()) for _ in range(size)]
    table = pipecomm.ForEveryMicrobatch(rows(WIDTH, seed=7))
    given = Batch(rows(8), rows(8, seed=2), {"table": table})
    return worst_error(rank, stages, [given], num_microbatches=4)


class HeadsFirst(nn.Module):
    """[rows, time, WIDTH] -> [rows, WIDTH, time], a view of memory that stays [.., WIDTH]."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x).tanh().transpose(1, 2)


class ViewBack(nn.Module):
    """Views its input as [rows * time, WIDTH], which a contiguous one does not allow."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        flat = x.transpose(1, 2).view(-1, WIDTH)
        return self.linear(flat).view(len(x), -1, WIDTH)


def view_after_transpose(rank: int, size: int) -> dict[str, float]:
    given = Batch(rows(8, shape=(24, WIDTH)), rows(8, seed=2, shape=(24, WIDTH)))
    found = {}
    for codec in ("raw", "int8"):
        torch.manual_seed(0)
        stages = [HeadsFirst(), ViewBack()]
        policy = CodecPolicy(codec, min_nbytes=0)
        options = {"num_microbatches": 3, "codec": policy, "grad_codec": policy}
        found[codec] = worst_error(rank, stages, [given, given], **options)
    return found


class Convolution(nn.Module):
    """Records whether what comes, and the gradient that comes back, is channels-last."""

    def __init__(self, num_in: int, num_out: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(num_in, num_out, 3, padding=1)
        self.seen: list[bool] = []

    def forward(self, x: Tensor) -> Tensor:
        self.note(x)
        y: Tensor = self.conv(x).tanh()
        y.register_hook(self.note)
        return y

    def note(self, tensor: Tensor) -> None:
        self.seen.append(tensor.is_contiguous(memory_format=torch.channels_last))


def channels_last(rank: int, size: int) -> dict[str, Any]:
    torch.manual_seed(0)
    stages = [Convolution(3, 8), Convolution(8, 8), Convolution(8, 2)]
    for stage in stages:
        stage.to(memory_format=torch.channels_last)
    x = rows(6, shape=(3, 6, 5)).contiguous(memory_format=torch.channels_last)
    y = rows(6, seed=2, shape=(2, 6, 5))
    unsplit = copy.deepcopy(stages)
    error = worst_error(rank, stages, [Batch(x, y)] * 2, num_microbatches=3)
    mse(whole_model(unsplit, x, {}), y).backward()
    return {"error": error, "seen": stages[rank].seen, "unsplit": unsplit[rank].seen}


class Emits(nn.Module):
    """Gives `make` of its result, or makes its gradient one of those."""

    def __init__(self, make: Any, *, as_gradient: bool) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.make, self.as_gradient = make, as_gradient

    def forward(self, x: Tensor) -> Tensor:
        if self.as_gradient:
            x.register_hook(self.make)
        y: Tensor = self.linear(x)
        return y if self.as_gradient else self.make(y)


def wrappers_between_stages(rank: int, size: int) -> dict[str, Outcome]:
    """What each rank raises when a stage gives one, or a gradient is one."""
    mesh = init_device_mesh("cpu", (size,))  # all ranks have to

    def distributed(tensor: Tensor) -> Tensor:
        return DTensor.from_local(tensor, mesh, [Replicate()], run_check=False)

    found = {}
    for name, make in (("DTensor", distributed), ("Doubled", Doubled)):
        for as_gradient in (False, True):
            torch.manual_seed(0)
            bad = rank == (1 if as_gradient else 0)
            stage = Emits(make, as_gradient=as_gradient) if bad else nn.Linear(WIDTH, WIDTH)
            options = {"num_microbatches": 2, "timeout_s": TIMEOUT_S}
            with Pipeline(stage, loss_fn=mse, **options) as pipeline:
                data = rows(4)

                def step(pipeline: Pipeline = pipeline, data: Tensor = data) -> Any:
                    return pipeline.train_step(data, data)

                found[f"{name} as {'gradient' if as_gradient else 'output'}"] = outcome_of(step)
    return found
