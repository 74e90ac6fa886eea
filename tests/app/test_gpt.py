"""The byte-level GPT: the same model however it is split."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from pipecomm.app.gpt import GptConfig, GptStage, byte_loss, layers_of_stage
from pipecomm.errors import ConfigError

SMALL = GptConfig(num_layers=4, width=16, num_heads=2, sequence_length=8)


def run_stages(num_stages: int, tokens: Tensor, seed: int = 0) -> Tensor:
    x = tokens
    for stage in range(num_stages):
        x = GptStage(SMALL, stage, num_stages, seed)(x)
    return x


def tokens() -> Tensor:
    return torch.randint(256, (3, 8), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("num_stages", [2, 3, 4])
def test_split_model_is_the_whole_model(num_stages: int) -> None:
    assert torch.equal(run_stages(num_stages, tokens()), run_stages(1, tokens()))


def test_weights_follow_the_seed_and_leave_the_global_generator_alone() -> None:
    state = torch.get_rng_state()
    first = run_stages(2, tokens(), seed=5)
    assert torch.equal(torch.get_rng_state(), state)
    torch.manual_seed(99)
    assert torch.equal(run_stages(2, tokens(), seed=5), first)
    assert not torch.equal(run_stages(2, tokens(), seed=6), first)


def test_layers_differ_from_each_other() -> None:
    blocks = GptStage(SMALL, 0, 1, 0).blocks
    weights = [block.qkv.weight for block in blocks]
    assert not torch.equal(weights[0], weights[1])


def test_fresh_model_knows_little() -> None:
    config = GptConfig()
    text = torch.randint(256, (4, 128), generator=torch.Generator().manual_seed(0))
    loss = byte_loss(GptStage(config, 0, 1, 0)(text), text.roll(1, dims=1))
    assert loss.item() == pytest.approx(math.log(256), abs=0.2)


def test_output_does_not_depend_on_later_bytes() -> None:
    text = tokens()
    changed = text.clone()
    changed[:, 5:] = (changed[:, 5:] + 1) % 256
    before, after = run_stages(1, text), run_stages(1, changed)
    assert torch.allclose(before[:, :5], after[:, :5], atol=1e-6)
    assert not torch.allclose(before[:, 5:], after[:, 5:], atol=1e-6)


def test_output_depends_on_the_order_of_the_bytes() -> None:
    text = tokens()
    swapped = text[:, [1, 0, 2, 3, 4, 5, 6, 7]]
    assert not torch.allclose(run_stages(1, text)[:, -1], run_stages(1, swapped)[:, -1], atol=1e-6)


def test_shorter_sequences_are_taken() -> None:
    assert run_stages(2, tokens()[:, :3]).shape == (3, 3, 256)


def test_every_parameter_gets_a_gradient() -> None:
    stage = GptStage(SMALL, 0, 1, 0)
    byte_loss(stage(tokens()), tokens()).backward()
    assert [n for n, p in stage.named_parameters() if p.grad is None or not p.grad.any()] == []


def test_loss_is_the_mean_over_all_bytes() -> None:
    logits = torch.zeros(2, 3, 256)
    logits[0, 0, 7] = 100.0
    targets = torch.full((2, 3), 7)
    assert byte_loss(logits, targets).item() == pytest.approx(math.log(256) * 5 / 6)


@pytest.mark.parametrize(("num_layers", "num_stages"), [(4, 2), (5, 2), (7, 3), (3, 3)])
def test_layers_are_shared_out_evenly_and_in_order(num_layers: int, num_stages: int) -> None:
    shares = [layers_of_stage(num_layers, stage, num_stages) for stage in range(num_stages)]
    assert [layer for share in shares for layer in share] == list(range(num_layers))
    assert max(map(len, shares)) - min(map(len, shares)) <= 1


def test_more_stages_than_layers_are_refused() -> None:
    with pytest.raises(ConfigError, match="3 layers for 4 stages"):
        layers_of_stage(3, 0, 4)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"num_layers": 0}, "num_layers: expected at least 1; got 0"),
        ({"sequence_length": 0}, "sequence_length"),
        ({"width": 18}, "multiple of 2 \\* num_heads = 4; got 18"),
    ],
)
def test_impossible_size_is_refused(change: dict[str, int], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        GptConfig(**{"width": 16, "num_heads": 2, **change})
