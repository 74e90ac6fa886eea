"""Names of devices are torch's; a module lies where its first parameter or buffer does."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from pipecomm.device import as_device, device_of
from pipecomm.errors import ConfigError


def test_name_and_device_become_the_device() -> None:
    assert as_device("cpu") == as_device(torch.device("cpu")) == torch.device("cpu")


@pytest.mark.parametrize("spec", ["gpu7", "", None, 1.5])
def test_what_is_no_device_is_refused_with_what_it_is(spec: object) -> None:
    with pytest.raises(ConfigError) as caught:
        as_device(spec)  # type: ignore[arg-type]
    assert f"expected a device, such as 'cpu'; got {spec!r}" in str(caught.value)


def test_module_lies_where_its_first_parameter_does() -> None:
    module = nn.Sequential(nn.Linear(2, 2, device="meta"), nn.Linear(2, 2))
    assert device_of(module) == torch.device("meta")


def test_buffers_count_where_there_is_no_parameter() -> None:
    module = nn.Module()
    module.register_buffer("table", torch.empty(1, device="meta"))
    assert device_of(module) == torch.device("meta")


def test_module_without_tensors_is_on_the_default_device() -> None:
    assert device_of(nn.ReLU()) == torch.get_default_device()
    with torch.device("meta"):
        assert device_of(nn.ReLU()) == torch.device("meta")
