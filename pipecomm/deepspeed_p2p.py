"""What DeepSpeed needs to send through pipecomm."""

from pipecomm.drop_in.deepspeed import can_send_recv, init_process_groups, install, recv, send, wait

__all__ = ["can_send_recv", "init_process_groups", "install", "recv", "send", "wait"]
