"""Before the fork: one process that imports torch once and starts the ranks."""
