"""Several hosts on one machine: network namespaces joined by a switch. Needs root."""
