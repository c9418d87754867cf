"""Before the fork: the zygote, one process per node, imports torch once and starts the ranks.

What reads the program's source and arranges its imports is in ``worker/``, as ranks need it too.
"""
