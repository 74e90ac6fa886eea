"""Runs a schedule on one rank: the stages, the batch, the loss, what a step took."""
