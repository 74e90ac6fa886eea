"""Megatron-LM's pipeline communicator over pipecomm: its names and results, sends that never wait.

Nothing of Megatron is imported: any object with the attributes read from `config` will do.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from pipecomm.drop_in.backend import BackendOptions, connect_beside
from pipecomm.errors import ConfigError, TensorError

__all__ = ["P2PCommunicator"]

# Both may cross one pair of ranks in one direction, each in an order of its own.
_FORWARD_TAG, _BACKWARD_TAG = 1, 2
_MAX_DIMS = 8

Tensor = torch.Tensor
Shape = Sequence[int]
Handles = dict[str, dist.Work]
OneOrMore = Tensor | list[Tensor | None] | None

# The backend of a group, and the options it was made with.
_connections: WeakKeyDictionary[dist.ProcessGroup, tuple[Any, BackendOptions]] = WeakKeyDictionary()


class P2PCommunicator:
    """Takes the place of megatron.core.pipeline_parallel.p2p_communication.P2PCommunicator.

    Sends return at once and go on in the background; what was sent must not be written to (its
    `data` may be replaced, as Megatron does). Receives give new tensors that require a gradient,
    of `config.pipeline_dtype`; they have arrived when the call returns, except with
    overlap_p2p_comm=True. With `config.variable_seq_lengths` each tensor brings its own shape.

    Attributes:
        pp_group: the ranks of the pipeline, in the order of its stages.
        config: Megatron's; read are pipeline_dtype, variable_seq_lengths, mtp_standalone,
            virtual_pipeline_model_parallel_size and timers.
        next_rank, prev_rank: global ranks of the neighbours, around the ends.
        virtual_pipeline_model_parallel_size: that of `config`.

    Raises ConfigError to receive without a pipeline_dtype, TensorError to send None to a stage
    that will wait for it, and what the backend raises.
    """

    def __init__(
        self,
        pp_group: dist.ProcessGroup,
        config: Any,
        *,
        options: BackendOptions | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        """Called on all ranks of pp_group, whose own backend may be any.

        The first one for a pp_group connects the ranks; later ones use the same connections:
        ConfigError where they give other `options` than the first. Received tensors lie on
        `device`; default: the current CUDA device if there is one, else the CPU.
        """
        self.pp_group = pp_group
        self.config = config
        # Ranks in the group; `next_rank` and `prev_rank` are global ones.
        self._next = (self.current_stage + 1) % self.total_stages
        self._prev = (self.current_stage - 1) % self.total_stages
        self.next_rank = dist.get_global_rank(pp_group, self._next)
        self.prev_rank = dist.get_global_rank(pp_group, self._prev)
        self.virtual_pipeline_model_parallel_size = config.virtual_pipeline_model_parallel_size
        self._device = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
        self._connection = _connection(pp_group, options)
        self._sends: deque[dist.Work] = deque()

    @property
    def is_pp_first_stage(self) -> bool:
        return self.current_stage == 0

    @property
    def is_pp_last_stage(self) -> bool:
        return self.current_stage == self.total_stages - 1

    @property
    def total_stages(self) -> int:
        return int(self.pp_group.size())

    @property
    def current_stage(self) -> int:
        return int(self.pp_group.rank())

    def recv_forward(self, tensor_shapes: Any, is_first_stage: bool) -> OneOrMore:
        """The activations of the previous stage: one, or a list for a list of shapes."""
        shapes, is_one = _as_shapes(tensor_shapes)
        with self._timed("forward-recv"):
            received = [
                None if is_first_stage else self._exchange(recv_prev=True, shape=shape)[0]
                for shape in shapes
            ]
        return received[0] if is_one else received

    def recv_backward(self, tensor_shapes: Any, is_last_stage: bool) -> OneOrMore:
        """The gradients of the next stage: one, or a list for a list of shapes."""
        shapes, is_one = _as_shapes(tensor_shapes)
        with self._timed("backward-recv"):
            received = [
                None if is_last_stage else self._exchange(recv_next=True, shape=shape)[1]
                for shape in shapes
            ]
        return received[0] if is_one else received

    def send_forward(self, output_tensors: OneOrMore, is_last_stage: bool) -> None:
        """Send activations to the next stage; the last stage sends nothing."""
        with self._timed("forward-send"):
            for tensor in [] if is_last_stage else _as_list(output_tensors):
                self._exchange(send_next=self._present(tensor))

    def send_backward(self, input_tensor_grads: OneOrMore, is_first_stage: bool) -> None:
        """Send gradients to the previous stage; the first stage sends nothing."""
        with self._timed("backward-send"):
            for tensor in [] if is_first_stage else _as_list(input_tensor_grads):
                self._exchange(send_prev=self._present(tensor))

    def send_forward_recv_backward(
        self, output_tensors: OneOrMore, tensor_shapes: Any, is_last_stage: bool
    ) -> OneOrMore:
        """Activations to the next stage, gradients from it."""
        self.send_forward(output_tensors, is_last_stage)
        received = self.recv_backward(_as_shapes(tensor_shapes)[0], is_last_stage)
        return received if isinstance(output_tensors, list) else _only(received)

    def send_backward_recv_forward(
        self, input_tensor_grads: OneOrMore, tensor_shapes: Any, is_first_stage: bool
    ) -> OneOrMore:
        """Gradients to the previous stage, activations from it."""
        self.send_backward(input_tensor_grads, is_first_stage)
        received = self.recv_forward(_as_shapes(tensor_shapes)[0], is_first_stage)
        return received if isinstance(input_tensor_grads, list) else _only(received)

    def send_forward_recv_forward(
        self,
        output_tensor: Tensor | None,
        recv_prev: bool,
        tensor_shape: Shape,
        overlap_p2p_comm: bool = False,
    ) -> Any:
        """Activations to the next stage and from the previous one; None sends nothing.

        With overlap_p2p_comm: (tensor, handles by "send_next" and "recv_prev"); the tensor may
        be read after handles["recv_prev"].wait().
        """
        with self._timed("forward-send-forward-recv"):
            if overlap_p2p_comm:
                received, _, handles = self._post(
                    send_next=output_tensor, recv_prev=recv_prev, shape=tensor_shape
                )
                return received, handles
            return self._exchange(send_next=output_tensor, recv_prev=recv_prev, shape=tensor_shape)[
                0
            ]

    def send_backward_recv_backward(
        self,
        input_tensor_grad: Tensor | None,
        recv_next: bool,
        tensor_shape: Shape,
        overlap_p2p_comm: bool = False,
    ) -> Any:
        """Gradients to the previous stage and from the next one; None sends nothing.

        With overlap_p2p_comm: (tensor, handles by "send_prev" and "recv_next"), as above.
        """
        with self._timed("backward-send-backward-recv"):
            if overlap_p2p_comm:
                _, received, handles = self._post(
                    send_prev=input_tensor_grad, recv_next=recv_next, shape=tensor_shape
                )
                return received, handles
            return self._exchange(
                send_prev=input_tensor_grad, recv_next=recv_next, shape=tensor_shape
            )[1]

    def send_forward_backward_recv_forward_backward(
        self,
        output_tensor: Tensor | None,
        input_tensor_grad: Tensor | None,
        recv_prev: bool,
        recv_next: bool,
        tensor_shape: Shape,
    ) -> tuple[Tensor | None, Tensor | None]:
        """All four at once: (activations from the previous stage, gradients from the next)."""
        with self._timed("forward-backward-send-forward-backward-recv"):
            return self._exchange(
                send_next=output_tensor,
                send_prev=input_tensor_grad,
                recv_prev=recv_prev,
                recv_next=recv_next,
                shape=tensor_shape,
            )

    def _exchange(self, **what: Any) -> tuple[Tensor | None, Tensor | None]:
        """As _post, but received tensors have arrived."""
        from_prev, from_next, handles = self._post(**what)
        for name, handle in handles.items():
            if name.startswith("recv"):
                handle.wait()
            else:
                self._keep(handle)
        return from_prev, from_next

    def _post(
        self,
        *,
        send_next: Tensor | None = None,
        send_prev: Tensor | None = None,
        recv_prev: bool = False,
        recv_next: bool = False,
        shape: Shape | None = None,
    ) -> tuple[Tensor | None, Tensor | None, Handles]:
        """Start the transfers asked for: (from the previous stage, from the next, handles)."""
        handles: Handles = {}
        # First, because a receive may wait for a shape.
        if send_next is not None:
            handles["send_next"] = self._send(send_next, self._next, _FORWARD_TAG)
        if send_prev is not None:
            handles["send_prev"] = self._send(send_prev, self._prev, _BACKWARD_TAG)
        from_prev = from_next = None
        if recv_prev:
            from_prev = self._new_tensor(shape, self._prev, _FORWARD_TAG)
            handles["recv_prev"] = self._connection.recv([from_prev], self._prev, _FORWARD_TAG)
        if recv_next:
            from_next = self._new_tensor(shape, self._next, _BACKWARD_TAG)
            handles["recv_next"] = self._connection.recv([from_next], self._next, _BACKWARD_TAG)
        return from_prev, from_next, handles

    def _send(self, tensor: Tensor, to: int, tag: int) -> dist.Work:
        if self._shapes_vary:
            dims = list(tensor.shape)
            if len(dims) > _MAX_DIMS:
                raise TensorError(f"expected at most {_MAX_DIMS} dimensions; got {len(dims)}")
            header = torch.tensor([len(dims), *dims, *[0] * (_MAX_DIMS - len(dims))])
            self._keep(self._connection.send([header.to(self._device)], to, tag))
        work: dist.Work = self._connection.send([tensor], to, tag)
        return work

    def _new_tensor(self, shape: Shape | None, source: int, tag: int) -> Tensor:
        if self._shapes_vary:
            header = torch.zeros(1 + _MAX_DIMS, dtype=torch.int64, device=self._device)
            self._connection.recv([header], source, tag).wait()
            num_dims, *dims = header.tolist()
            shape = dims[:num_dims]
        dtype = self.config.pipeline_dtype
        if dtype is None or shape is None:
            raise ConfigError(
                f"expected a shape and config.pipeline_dtype to receive with; got shape {shape} "
                f"and {dtype}; where: stage {self.current_stage}"
            )
        return torch.empty(tuple(shape), dtype=dtype, device=self._device, requires_grad=True)

    def _keep(self, send: dist.Work) -> None:
        """Look after a send in the background; raises the error of one that has failed."""
        self._sends.append(send)
        while self._sends and self._sends[0].is_completed():
            self._sends.popleft().wait()

    def _present(self, tensor: Tensor | None) -> Tensor:
        if tensor is None:
            raise TensorError(
                f"expected a tensor to send, which the neighbour waits for; got None; where: stage "
                f"{self.current_stage}; a stage's input has no gradient if nothing was computed "
                "from it"
            )
        return tensor

    @property
    def _shapes_vary(self) -> bool:
        return bool(self.config.variable_seq_lengths or getattr(self.config, "mtp_standalone", 0))

    @contextlib.contextmanager
    def _timed(self, name: str) -> Iterator[None]:
        timers = getattr(self.config, "timers", None)
        if timers is None:
            yield
            return
        timers(name, log_level=2).start()
        try:
            yield
        finally:
            timers(name).stop()


def _connection(pp_group: dist.ProcessGroup, options: BackendOptions | None) -> Any:
    # Megatron makes a communicator for every step.
    if pp_group not in _connections:
        options = options or BackendOptions()
        _connections[pp_group] = connect_beside(pp_group, options), options
    connection, made_with = _connections[pp_group]
    if options is not None and options != made_with:
        raise ConfigError(
            f"expected the options that this pipeline group was connected with, {made_with}; got "
            f"{options}; where: rank {pp_group.rank()} of the group; give all communicators of a "
            f"group the same options, or only the first one"
        )
    return connection


def _as_shapes(shapes: Any) -> tuple[list[Shape], bool]:
    """A list of shapes, and whether a single one was given."""
    is_one = isinstance(shapes, torch.Size) or bool(shapes and isinstance(shapes[0], int))
    return ([shapes] if is_one else list(shapes)), is_one


def _as_list(tensors: OneOrMore) -> list[Tensor | None]:
    return tensors if isinstance(tensors, list) else [tensors]


def _only(received: OneOrMore) -> OneOrMore:
    return received[0] if isinstance(received, list) else received
