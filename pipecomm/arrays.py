"""Codecs for arrays of other libraries, over DLPack."""

from pipecomm.codecs.arrays import decode_array, encode_array

__all__ = ["decode_array", "encode_array"]
