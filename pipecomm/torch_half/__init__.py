"""Finds, builds and loads the part of pipecomm that is compiled against the running torch."""
