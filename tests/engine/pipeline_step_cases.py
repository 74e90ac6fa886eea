"""Cases of correct steps. Each gives the worst relative error, unless it says otherwise."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from pipecomm.codecs.policy import CodecPolicy
from pipecomm.engine.pipeline import Pipeline
from pipecomm.links.limits import FlowLimits
from pipecomm.links.link import LinkEmulation
from pipecomm.schedule import Schedule, build
from tests.engine.pipeline_cases import (
    TIMEOUT_S,
    WIDTH,
    Batch,
    batch,
    linear_stages,
    mse,
    rows,
    worst_error,
)
from tests.engine.pipeline_modules import (
    AddPosition,
    AddResidual,
    CarryMixed,
    Fork,
    PassResidual,
    Scaled,
    TakeAux,
    UseObject,
    ViewOut,
    WithAux,
    frozen,
    made,
)


def few_microbatches(rank: int, size: int) -> dict[str, float]:
    return {
        f"{schedule} {number}": worst_error(
            rank,
            linear_stages(size),
            [batch(4)] * 2,
            schedule=schedule,
            num_microbatches=number,
        )
        for schedule in ("sequential", "gpipe", "1f1b")
        for number in (1, 2, 3)
    }


def uneven_rows(rank: int, size: int) -> float:
    return worst_error(rank, linear_stages(size), [batch(8)], num_microbatches=3)


def smaller_last_batch(rank: int, size: int) -> float:
    batches = [batch(n, seed=i) for i, n in enumerate((8, 8, 6, 8, 8, 6))]
    return worst_error(rank, linear_stages(size), batches, num_microbatches=2)


def one_row_each(rank: int, size: int) -> float:
    return worst_error(rank, linear_stages(size), [batch(4)], num_microbatches=4)


def length_changes_between_steps(rank: int, size: int) -> float:
    batches = [batch(4, seed=n, shape=(n, WIDTH)) for n in (128, 129, 64, 128)]
    return worst_error(rank, linear_stages(size), batches, num_microbatches=2)


def length_changes_between_microbatches(rank: int, size: int) -> float:
    parts = [batch(2, seed=n, shape=(n, WIDTH)) for n in (7, 9, 3, 12)]
    given = Batch([part.inputs for part in parts], [part.targets for part in parts])
    return worst_error(rank, linear_stages(size), [given] * 2, num_microbatches=4)


def ready_microbatches_of_other_sizes(rank: int, size: int) -> float:
    parts = [batch(n, seed=n) for n in (1, 5, 2)]
    given = Batch([part.inputs for part in parts], [part.targets for part in parts])
    return worst_error(rank, linear_stages(size), [given], num_microbatches=3)


def residual_beside(rank: int, size: int) -> float:
    torch.manual_seed(0)
    stages = [Fork(), *(PassResidual() for _ in range(size - 2)), AddResidual()]
    return worst_error(rank, stages, [batch(4)] * 2, num_microbatches=4)


def integers_beside(rank: int, size: int) -> dict[str, Any]:
    stages = made(CarryMixed, size)
    ids = torch.arange(64).reshape(8, 8) + 2**40
    mask = torch.rand(8, 1, 8, 8) > 0.3
    lengths = torch.arange(8, dtype=torch.int32)
    given = Batch((rows(8, shape=(8, WIDTH)), ids, mask, lengths), rows(8, shape=(8, WIDTH)))
    error = worst_error(
        rank, stages, [given], loss_fn=lambda output, y: mse(output[0], y), num_microbatches=4
    )
    columns = [torch.cat(column) for column in zip(*stages[rank].seen, strict=True)]
    exact = all(
        torch.equal(got, sent) and got.dtype == sent.dtype
        for got, sent in zip(columns, (ids, mask, lengths), strict=True)
    )
    asked = any(part.requires_grad for seen in stages[rank].seen for part in seen)
    return {"error": error, "exact": exact, "asked for gradients": asked}


def scalar_beside(rank: int, size: int) -> dict[str, Any]:
    torch.manual_seed(0)
    stages = [WithAux(), TakeAux()]
    parts = [batch(2, seed=n) for n in range(4)]
    given = Batch([part.inputs for part in parts], [part.targets for part in parts])
    error = worst_error(
        rank,
        stages,
        [given],
        loss_fn=lambda output, y: mse(output[0], y) + output[1],
        num_microbatches=4,
    )
    return {"error": error, "shapes": getattr(stages[rank], "aux_shapes", None)}


def keywords_on_every_stage(rank: int, size: int) -> dict[str, Any]:
    stages = made(AddPosition, size)
    given = batch(8)
    given.kwargs = {"pos": torch.arange(10, 18).reshape(8, 1)}
    error = worst_error(rank, stages, [given], num_microbatches=4)
    return {"error": error, "seen": stages[rank].seen}


def object_as_keyword(rank: int, size: int) -> dict[str, Any]:
    stages = made(UseObject, size)
    given = batch(8)
    given.kwargs = {"scaled": Scaled()}
    error = worst_error(rank, stages, [given], num_microbatches=4)
    same = [seen is given.kwargs["scaled"] for seen in stages[rank].seen]
    return {"error": error, "same": same}


def frozen_stages(rank: int, size: int) -> dict[str, float]:
    def error(*which: int) -> float:
        stages = frozen(linear_stages(size), *which)
        return worst_error(rank, stages, [batch(8)] * 2, num_microbatches=4)

    return {
        "first": error(0),
        "middle": error(1),
        "all but last": error(*range(size - 1)),
        "last": error(size - 1),
    }


def frozen_embedding(rank: int, size: int) -> float:
    torch.manual_seed(0)
    embedding = nn.Embedding(50, WIDTH).requires_grad_(False)
    stages = [embedding, *linear_stages(size - 1)]
    given = Batch(torch.arange(8), rows(8))
    return worst_error(rank, stages, [given], num_microbatches=4)


def stage_without_parameters(rank: int, size: int) -> float:
    stages = linear_stages(size)
    stages[1] = nn.ReLU()
    return worst_error(rank, stages, [batch(8)] * 2, num_microbatches=4)


def output_is_a_view(rank: int, size: int) -> float:
    torch.manual_seed(0)
    stages = [ViewOut(), *linear_stages(size - 1)]
    return worst_error(rank, stages, [batch(8)] * 2, num_microbatches=4)


def backward_pre_hook(rank: int, size: int) -> float:
    stages = linear_stages(size)
    stages[0].register_full_backward_pre_hook(lambda module, grads: None)
    return worst_error(rank, stages, [batch(8)] * 2, num_microbatches=4)


def valid_token_loss(rank: int, size: int) -> float:
    def summed(output: Tensor, labels: Tensor) -> Tensor:
        return nn.functional.cross_entropy(
            output.flatten(0, 1), labels.flatten(), ignore_index=-100, reduction="sum"
        )

    labels = torch.full((4, 8), -100)
    for row, valid in enumerate((5, 1, 8, 2)):
        labels[row, :valid] = torch.arange(valid)
    given = Batch(rows(4, shape=(8, WIDTH)), labels, loss_divisor=16)
    return worst_error(
        rank,
        linear_stages(size),
        [given],
        loss_fn=summed,
        loss_reduction="sum",
        num_microbatches=4,
    )


def custom_schedule(rank: int, size: int) -> float:
    plan = Schedule.from_lists("mine", build("gpipe", size, 3).ranks)
    return worst_error(rank, linear_stages(size), [batch(6)], schedule=plan)


def lossy_codecs(rank: int, size: int) -> dict[str, float]:
    return {
        codec: worst_error(
            rank,
            linear_stages(size),
            [batch(8, shape=(8, WIDTH))],
            codec=CodecPolicy(codec, min_nbytes=0),
            grad_codec=CodecPolicy("int8", min_nbytes=0),
            num_microbatches=4,
        )
        for codec in ("int8", "int4")
    }


def without_eager_sends(rank: int, size: int) -> dict[str, float]:
    """Every schedule, also where a send is done only when its receive is posted."""
    return {
        name: worst_error(
            rank,
            linear_stages(size),
            [batch(8)],
            schedule=name,
            num_microbatches=8,
            limits=FlowLimits(strict=True),
        )
        for name in ("sequential", "gpipe", "1f1b", "eager-1f1b")
    }


def policies(rank: int, size: int) -> dict[str, Any]:
    """By policy: this rank's codecs and the bytes of tensors and wire it sent in each step."""
    chosen: dict[str, Any] = {
        "one for each": ["int4", "raw", "int8"],
        "the first": CodecPolicy("int4", boundaries=range(1)),
        "without ends": CodecPolicy("int4", keep_ends_raw=True),
        "after a step": CodecPolicy("int4", warmup_steps=1),
        "too small": CodecPolicy("int4", min_nbytes=100_000),
        "guarded": CodecPolicy("int4", guard_every=1, guard_limit=0.001),
    }
    found = {}
    for name, codec in chosen.items():
        with Pipeline(
            linear_stages(size)[rank], loss_fn=mse, codec=codec, timeout_s=TIMEOUT_S
        ) as pipeline:
            sent = []
            for _ in range(2):
                stats = pipeline.train_step(
                    rows(8, shape=(64, WIDTH)), rows(8, shape=(64, WIDTH))
                ).stats
                forwards = [e for e in stats.events if e.name.startswith("send forward")]
                sent += [e.args["wire_nbytes"] < e.args["payload_nbytes"] / 2 for e in forwards]
            found[name] = (pipeline.codecs, sent)
    return found


def automatic(rank: int, size: int) -> dict[float, dict[str, str]]:
    """By the link's emulated speed in Mbit/s; 0 is the real one."""
    found = {}
    for mbps in (0.0, 8000.0, 20.0):
        emulation = LinkEmulation(mbps) if mbps else None
        with Pipeline(
            linear_stages(size)[rank],
            loss_fn=mse,
            codec="auto",
            grad_codec="auto",
            timeout_s=TIMEOUT_S,
            emulation=emulation,
        ) as pipeline:
            pipeline.train_step(rows(4), rows(4))
            found[mbps] = pipeline.codecs
    return found


def autocast(rank: int, size: int) -> dict[str, Any]:
    stages = linear_stages(size)
    gradient_dtypes: list[torch.dtype] = []
    input_dtypes: list[torch.dtype] = []

    def watch(module: nn.Module, args: tuple[Tensor, ...]) -> None:
        input_dtypes.append(args[0].dtype)
        if args[0].requires_grad:
            args[0].register_hook(lambda grad: gradient_dtypes.append(grad.dtype))

    with torch.autocast("cpu", dtype=torch.bfloat16):
        error = worst_error(rank, stages, [batch(8)] * 2, num_microbatches=2)
        stages[rank].register_forward_pre_hook(watch)
        with Pipeline(
            stages[rank], loss_fn=mse, num_microbatches=2, timeout_s=TIMEOUT_S
        ) as pipeline:
            pipeline.train_step(rows(8), rows(8))
    return {"error": error, "inputs": input_dtypes, "gradients": gradient_dtypes}


def identity_outputs(rank: int, size: int) -> dict[str, Any]:
    given = torch.arange(24.0).reshape(8, 3).requires_grad_()
    losses: list[float] = []

    def recorded(output: Tensor, target: Tensor) -> Tensor:
        losses.append(mse(output, target).item())
        return mse(output, target)

    with Pipeline(
        nn.Identity(), loss_fn=recorded, num_microbatches=8, timeout_s=TIMEOUT_S
    ) as pipeline:
        result = pipeline.train_step(given, given, return_outputs=True)
    outputs = None if result.outputs is None else torch.cat(result.outputs)
    return {"losses": losses, "in order": outputs is not None and torch.equal(outputs, given)}


def iterators_as_data(rank: int, size: int) -> dict[str, Any]:
    parts = [batch(2, seed=n) for n in range(6)]
    inputs = iter([part.inputs for part in parts])
    targets = iter([part.targets for part in parts])
    losses = []
    with Pipeline(
        linear_stages(size)[rank], loss_fn=mse, num_microbatches=3, timeout_s=TIMEOUT_S
    ) as pipeline:
        for _ in range(2):
            losses.append(pipeline.train_step(inputs, targets).loss)
    used = inputs if rank == 0 else targets
    return {"losses": losses, "left": len(list(used)) if rank in (0, size - 1) else None}


CASES = {
    2: (
        few_microbatches,
        smaller_last_batch,
        one_row_each,
        length_changes_between_steps,
        ready_microbatches_of_other_sizes,
        scalar_beside,
        output_is_a_view,
        backward_pre_hook,
        valid_token_loss,
        lossy_codecs,
        automatic,
        autocast,
        object_as_keyword,
        iterators_as_data,
    ),
    3: (
        uneven_rows,
        residual_beside,
        integers_beside,
        keywords_on_every_stage,
        frozen_stages,
        frozen_embedding,
        stage_without_parameters,
        identity_outputs,
    ),
    4: (
        policies,
        without_eager_sends,
        few_microbatches,
        length_changes_between_microbatches,
        residual_beside,
        custom_schedule,
    ),
}
