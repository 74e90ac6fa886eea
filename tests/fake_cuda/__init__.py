"""The CUDA half over a stand-in driver: which calls there are."""
