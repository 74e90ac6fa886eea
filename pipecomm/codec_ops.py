"""Codecs as torch operators."""

from pipecomm.codecs.ops import decode, encode, through

__all__ = ["decode", "encode", "through"]
