"""Before the fork: one process that imports torch once and forks the ranks."""
