"""What Megatron-LM needs to send through pipecomm."""

from pipecomm.drop_in.megatron import P2PCommunicator

__all__ = ["P2PCommunicator"]
