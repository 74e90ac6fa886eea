"""Messages of tensors between ranks, over the core's transport."""
