"""What the compiler made of the codec's kernels: exact instructions, registers, spills."""
