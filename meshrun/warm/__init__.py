"""Warm servers: processes of the user's that hold imported libraries, and fork zygotes for runs.

The launcher's side is ``client.py``, the process ``warm_server.py``; ``keeper.py`` stands between
it and a run's zygote. ``identity.py`` says when a server is as good as a new interpreter.
"""
