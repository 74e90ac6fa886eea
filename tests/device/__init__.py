"""What only a GPU can show: run by `make device-check`, not by `make test`."""
