"""Launching on other hosts through ssh: a conductor here, an agent on each of them."""
