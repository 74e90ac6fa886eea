"""What ranks must have alike is told with both values and both ranks."""

from __future__ import annotations

import pytest
import torch

from pipecomm.errors import ConfigError
from pipecomm.links.agreement import check_settings, check_title, title_tensor


def test_equal_settings_agree() -> None:
    check_settings(["a"] * 3, 1, "pipeline")


def test_settings_that_differ_are_told_with_the_rank_that_has_them() -> None:
    text = "got 'a' on rank 0 and 'b' on rank 2; where: rank 1, process group 'pipeline'"
    with pytest.raises(ConfigError, match=text):
        check_settings(["a", "a", "b"], 1, "pipeline")


@pytest.mark.parametrize("title", ["train_step with num_microbatches=8", "é"])
def test_title_comes_back_from_its_tensor(title: str) -> None:
    check_title(title, title_tensor(title), 1)


@pytest.mark.parametrize(
    ("sent", "got"),
    [
        (title_tensor("eval_step"), "eval_step"),
        (None, "something else"),
        (torch.zeros(4), "something else"),
        (torch.zeros(2, 2, dtype=torch.uint8), "something else"),
        (torch.zeros(1001, dtype=torch.uint8), "something else"),
        (torch.tensor([255], dtype=torch.uint8), "\N{REPLACEMENT CHARACTER}"),
    ],
)
def test_other_titles_and_what_is_none_are_refused(sent: torch.Tensor | None, got: str) -> None:
    with pytest.raises(ConfigError, match=f"got train_step on this rank and {got} on rank 3"):
        check_title("train_step", sent, 3)
