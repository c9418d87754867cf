"""After the fork: a rank, from its first moment to its end."""
