"""Launching on other hosts: a controller here, an agent on each of them."""
