"""The torch.distributed backend, and what other frameworks need to use it."""
