"""Thin wrappers around the operating system: devices, cores, sockets, processes."""
