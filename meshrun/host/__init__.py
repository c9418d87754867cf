"""Thin doors to the operating system: devices, cores, sockets, processes."""
