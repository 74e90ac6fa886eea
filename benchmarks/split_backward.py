"""What does a backward in parts, I and W, cost and keep, beside a whole one and torch's parts?"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from _harness import add_options, measure, report
from torch import Tensor, nn
from torch.distributed.pipelining._backward import stage_backward_input, stage_backward_weight

from pipecomm.app.gpt import GptConfig, GptStage
from pipecomm.engine.backward import Backward
from pipecomm.engine.split_backward import SplitBackward

# The second of three stages, all of whose layers are blocks: width, blocks, rows, length. The first
# is so small that only Python counts.
SIZES = ((8, 4, 1, 4), (256, 4, 2, 64), (512, 2, 2, 128))


class Microbatch:
    """One stage, one input, and the three ways back."""

    def __init__(self, width: int, num_blocks: int, rows: int, length: int) -> None:
        config = GptConfig(3 * num_blocks, width, 4 if width > 8 else 1, length)
        self.stage = GptStage(config, 1, 3, seed=1)
        self.split = SplitBackward(self.stage, "stage 1 of 3")
        self.x = torch.randn(rows, length, width)
        self.gradient = torch.randn(rows, length, width)
        self.seconds: dict[str, float] = {}

    def input(self) -> Tensor:
        return self.x.detach().requires_grad_()

    def plain(self) -> tuple[Tensor, Tensor]:
        x = self.input()
        return x, self.stage(x)

    def ours(self) -> tuple[Tensor, Tensor]:
        self.split.begin()
        x = self.input()
        return x, self.stage(x)


def whole(m: Microbatch, x: Tensor, y: Tensor) -> Tensor | None:
    return Backward.between([x], [y]).run([m.gradient])[0]


def our_parts(m: Microbatch, x: Tensor, y: Tensor) -> tuple[Callable[[], Any], Callable[[], None]]:
    def first() -> Any:
        with m.split.keeping(0):
            return Backward.between([x], [y]).run([m.gradient])[0]

    return first, lambda: m.split.finish(0)


def torchs_parts(
    m: Microbatch, x: Tensor, y: Tensor
) -> tuple[Callable[[], Any], Callable[[], None]]:
    groups: list[Any] = []

    def first() -> Any:
        gradients, found = stage_backward_input([y], [m.gradient], [x], m.stage.parameters())
        groups.extend(found)
        return gradients[0]

    def second() -> None:
        stage_backward_weight(m.stage.parameters(), groups)

    return first, second


@contextmanager
def fresh(m: Microbatch) -> Iterator[None]:
    m.stage.zero_grad()
    yield
    m.split.end()


def check(m: Microbatch) -> tuple[bool, bool]:
    """Whether our parts, and torch's, give the bits of a whole backward; equal they must be."""
    with fresh(m):
        expected = [whole(m, *m.plain()), *_gradients(m.stage)]
    same = []
    for forward, parts in ((m.ours, our_parts), (m.plain, torchs_parts)):
        with fresh(m):
            first, second = parts(m, *forward())
            of_input = first()
            second()
            got = [of_input, *_gradients(m.stage)]
        for ours, plain in zip(got, expected, strict=True):
            torch.testing.assert_close(ours, plain, rtol=1e-4, atol=1e-5)
        same.append(all(torch.equal(a, b) for a, b in zip(got, expected, strict=True)))
    assert same[0]
    return same[0], same[1]


def _gradients(module: nn.Module) -> list[Tensor]:
    return [p.grad.clone() for p in module.parameters() if p.grad is not None]


def saved_nbytes(m: Microbatch, forward: Callable[[], tuple[Tensor, Tensor]]) -> int:
    """What the graph of a forward holds besides weights; torch's split holds it until W."""
    weights = {p.untyped_storage().data_ptr() for p in m.stage.parameters()}
    found: dict[int, int] = {}

    def note(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        found[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor), fresh(m):
        kept = forward()
        del kept
    return sum(nbytes for pointer, nbytes in found.items() if pointer not in weights)


def kept_nbytes(m: Microbatch) -> int:
    """What ours holds from I to W."""
    with fresh(m):
        first, _ = our_parts(m, *m.ours())
        first()
        tensors = [t for call in m.split._kept[0] for t in (call.x, call.gradient)]
        storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
        return sum(storages.values())


def times(m: Microbatch, rounds: int) -> dict[str, float]:
    """Median seconds of each action, all in turn."""
    state: dict[str, Any] = {}

    def forward(name: str) -> None:
        x = m.input()
        state[name] = x, m.stage(x)

    def parts(name: str, make: Any) -> None:
        state[name] = make(m, *state[name])

    calls: dict[str, Callable[[], object]] = {
        "F": lambda: forward("whole"),
        "B": lambda: whole(m, *state["whole"]),
        "begin": m.split.begin,
        "our F": lambda: forward("ours"),
        "our parts": lambda: parts("ours", our_parts),
        "our I": lambda: state["ours"][0](),
        "our W": lambda: state["ours"][1](),
        "end": m.split.end,
        "torch F": lambda: forward("torch"),
        "torch parts": lambda: parts("torch", torchs_parts),
        "torch I": lambda: state["torch"][0](),
        "torch W": lambda: state["torch"][1](),
    }
    return {name: timing.median_s for name, timing in measure(calls, rounds).items()}


def row(size: tuple[int, int, int, int], rounds: int) -> dict[str, Any]:
    m = Microbatch(*size)
    _, torch_same = check(m)
    seconds = times(m, rounds)
    return {
        "case": f"{size[1]} blocks of {size[0]}, {size[2] * size[3]} tokens",
        "our F / F": seconds["our F"] / seconds["F"],
        "B_us": 1e6 * seconds["B"],
        "I_us": 1e6 * seconds["our I"],
        "W_us": 1e6 * seconds["our W"],
        "(I+W) / B": (seconds["our I"] + seconds["our W"]) / seconds["B"],
        "torch I_us": 1e6 * seconds["torch I"],
        "torch W_us": 1e6 * seconds["torch W"],
        "torch (I+W) / B": (seconds["torch I"] + seconds["torch W"]) / seconds["B"],
        "kept I to W": kept_nbytes(m),
        "torch keeps": saved_nbytes(m, m.plain),
        "torch same bits": torch_same,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    add_options(parser)
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows = [row(size, options.rounds) for size in SIZES]
    report("split_backward", rows, title="one microbatch, one thread", save=options.json)


if __name__ == "__main__":
    main()
