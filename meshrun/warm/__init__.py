"""Warm servers: processes of the user's that hold imported libraries and fork zygotes for runs.

The launcher's side is ``client.py``, the server's ``warm_server.py``. ``shim.py`` is the
parent of a run's zygote. ``identity.py`` decides when a server equals a new interpreter.
"""
