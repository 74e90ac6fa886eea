"""Several versions of one stage's weights: which one the module has now, which are kept and why.

A version is a list of storages. Parameters stay the objects they are, for the module, the optimizer
and autograd; what changes is the memory they stand for. Buffers (BatchNorm's statistics) have no
versions.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.autograd.grad_mode import _unsafe_preserve_version_counter as preserve_version_counter

__all__ = ["WeightVersions"]

# The memory of each parameter, in their order.
_Storages = list[Tensor]


class WeightVersions:
    """Of `parameters`. Version 0 is what they are when a step begins; update n makes version n.

    A version is kept while begin() has promised it more uses, and the newest always. Memory that
    no version needs is used again for the next one.
    """

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        self._parameters = tuple(dict.fromkeys(parameters))
        self._kept: dict[int, _Storages] = {}
        self._free: list[_Storages] = []
        self._uses_left: Counter[int] = Counter()
        self._newest = self._installed = 0
        self._most_kept = 0

    @property
    def newest(self) -> int:
        return self._newest

    @property
    def most_kept(self) -> int:
        """The most versions at one time since begin()."""
        return self._most_kept

    def begin(self, uses: Mapping[int, int]) -> None:
        """A step begins in which version v is used uses[v] times, updates among them."""
        self._uses_left = Counter(uses)
        self._newest = self._installed = 0
        self._kept = {0: [parameter.data for parameter in self._parameters]}
        self._most_kept = 1

    @contextmanager
    def using(self, version: int) -> Iterator[None]:
        """In the block the parameters have `version`; a forward's is the one for its backward.

        Raises KeyError for a version that is not kept, or not yet made.
        """
        self._install(version)
        yield
        self._uses_left[version] -= 1
        self._let_go(version)

    def storages(self, version: int) -> list[Tensor]:
        """The values of a version that is kept, without autograd; not to be changed."""
        return list(self._kept[version])

    def show_newest(self) -> None:
        """Put the newest version there."""
        self._install(self._newest)

    def update(self, version: int, step: Callable[[], None]) -> None:
        """Make the next version of the newest by `step`, which changes the parameters in place.

        The update is the last of the uses of `version` that its gradients make. The newest is
        copied first if it is still to be used as it is; into memory of a version that is gone, if
        there is any. What backward passes have saved stays valid to them: they see the version
        that using() puts there for them.
        """
        self.show_newest()
        old = self._newest
        self._uses_left[version] -= 1
        self._let_go(version)
        is_kept = self._uses_left[old] > 0
        if is_kept:
            self._move_to_copies()
        # A version that lives on must not look changed to the graphs that were made with it.
        with preserve_version_counter(self._parameters):
            step()
        if not is_kept:
            del self._kept[old]
        self._newest = self._installed = old + 1
        self._kept[self._newest] = [parameter.data for parameter in self._parameters]
        self._most_kept = max(self._most_kept, len(self._kept))

    def end(self) -> None:
        """The step is over, or given up: the parameters have the newest version, the only one."""
        if self._kept:
            self.show_newest()
        self._kept.clear()
        self._free.clear()
        self._uses_left.clear()

    def _install(self, version: int) -> None:
        storages = self._kept[version]
        if version != self._installed:
            for parameter, storage in zip(self._parameters, storages, strict=True):
                parameter.data = storage
            self._installed = version

    def _move_to_copies(self) -> None:
        room = self._free.pop() if self._free else [torch.empty_like(p) for p in self._parameters]
        for parameter, storage in zip(self._parameters, room, strict=True):
            parameter.data = storage.detach().copy_(parameter.data)

    def _let_go(self, version: int) -> None:
        if version in self._kept and version != self._newest and self._uses_left[version] <= 0:
            self._free.append(self._kept.pop(version))
