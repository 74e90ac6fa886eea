"""Codecs: values of 16 or 32 bits as 8 or 4 on the wire; and which one is used where."""
