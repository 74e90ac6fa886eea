"""Parameters of which several ranks hold a copy: one counts, and all must be equal bit by bit.

Knows names and tensors, and a way to exchange them; nothing of norms.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from pipecomm.engine.grad_norm import Gather, local_part
from pipecomm.errors import ConfigError, TensorError

__all__ = ["counted_elsewhere", "fingerprint"]

# Elements that are copied at a time: 8 MiB as int64 or float64.
_CHUNK = 2**20
# Odd, so that no bit of what came before is lost.
_FACTOR = 6364136223846793005
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}

# What is told of a copy, in this order, to compare with those of other ranks.
_Copy = dict[str, Any]


def counted_elsewhere(
    shared: Mapping[str, nn.Parameter] | None,
    parameters: Iterable[nn.Parameter],
    rank: int,
    gather: Gather,
) -> list[nn.Parameter]:
    """Those of `shared` that an earlier rank has a copy of, by name; on every rank None: none.

    `shared` names `parameters` of this rank; every rank calls this with its own. Compares shape,
    dtype, values and gradients of the copies, of DTensors the shards of this rank. Raises, on
    every rank, ConfigError for a name that only one of several ranks has and TensorError for
    copies that differ, with how far they are apart.
    """
    if shared is None:
        return []
    _check(shared, parameters, rank)
    copies = [json.loads(text) for text in _exchange(json.dumps(_described(shared)), gather)]
    for name in dict.fromkeys(name for of_rank in copies for name in of_rank):
        first, *others = (peer for peer, of_rank in enumerate(copies) if name in of_rank)
        if not others and len(copies) > 1:
            raise ConfigError(
                f'expected shared parameter "{name}" on two ranks or more; got it on rank '
                f"{first} only. Copies of one parameter have one name on all their ranks"
            )
        for other in others:
            _compare(name, (first, other), copies, shared.get(name), gather)
    earlier = {name for of_rank in copies[:rank] for name in of_rank}
    return [parameter for name, parameter in shared.items() if name in earlier]


def _check(
    shared: Mapping[str, nn.Parameter], parameters: Iterable[nn.Parameter], rank: int
) -> None:
    if not isinstance(shared, Mapping):
        raise ConfigError(
            f"expected shared as a mapping from names to parameters of the rank, empty where it "
            f"has none; got {type(shared).__name__} on rank {rank}"
        )
    known = set(parameters)
    for name, parameter in shared.items():
        is_parameter = isinstance(parameter, nn.Parameter) and parameter in known
        if not isinstance(name, str) or not is_parameter:
            raise ConfigError(
                f"expected names of parameters of rank {rank} in shared; got "
                f"{name!r}: {type(parameter).__name__}, which is none of them"
            )


def _described(shared: Mapping[str, nn.Parameter]) -> dict[str, _Copy]:
    return {
        name: {
            "shape": list(parameter.shape),
            "dtype": str(parameter.dtype),
            "values": fingerprint(parameter),
            "gradients": fingerprint(parameter.grad),
        }
        for name, parameter in shared.items()
    }


def _exchange(text: str, gather: Gather) -> list[str]:
    """Every rank's text, in order."""
    own = torch.frombuffer(bytearray(text, "utf-8"), dtype=torch.uint8)
    lengths = [int(length) for length in gather(torch.tensor(own.numel()))]
    padded = torch.zeros(max(lengths), dtype=torch.uint8)
    padded[: own.numel()] = own
    texts = zip(gather(padded), lengths, strict=True)
    return [bytes(row[:length].tolist()).decode() for row, length in texts]


def fingerprint(tensor: Tensor | None) -> int | None:
    """A number that depends on every bit and its position, whatever the device."""
    if tensor is None:
        return None
    flat = local_part(tensor.detach())[0].reshape(-1)
    words = flat.view(_INTEGERS.get(flat.element_size(), torch.int8))
    weights = torch.arange(1, min(_CHUNK, words.numel()) + 1, device=flat.device)
    result = torch.zeros((), dtype=torch.int64, device=flat.device)
    for start in range(0, words.numel(), _CHUNK):
        chunk = words[start : start + _CHUNK]
        result = result * _FACTOR + (chunk * weights[: chunk.numel()]).sum()
    return int(result)


def _compare(
    name: str,
    pair: tuple[int, int],
    copies: list[dict[str, _Copy]],
    own: nn.Parameter | None,
    gather: Gather,
) -> None:
    first, other = (copies[peer][name] for peer in pair)
    for what, value in first.items():
        if value == other[what]:
            continue
        got = f"{value} and {other[what]}"
        if what in ("values", "gradients"):
            mine = own if own is None or what == "values" else own.grad
            got = "none on one of them"
            if value is not None and other[what] is not None:
                got = f"a largest difference of {_difference(mine, pair, gather):.3g}"
        raise TensorError(
            f'expected equal {what} in the copies of "{name}" on ranks {pair[0]} and {pair[1]}; '
            f"got {got}. Add up their gradients before clipping, with one all_reduce over the "
            f"ranks that share it, and start from equal values"
        )


def _difference(own: Tensor | None, pair: tuple[int, int], gather: Gather) -> float:
    """The largest between two ranks' tensors; every rank calls this, with None if it has none."""
    local = torch.zeros(0) if own is None else local_part(own.detach())[0].reshape(-1)
    longest = max(int(length) for length in gather(torch.tensor(local.numel())))
    worst = 0.0
    for start in range(0, longest, _CHUNK):
        chunk = torch.zeros(min(_CHUNK, longest - start), dtype=torch.float64)
        part = local[start : start + _CHUNK]
        chunk[: part.numel()] = part
        values = gather(chunk)
        worst = max(worst, float((values[pair[0]] - values[pair[1]]).abs().max()))
    return worst
