"""After the fork: a rank, from its start to its end."""
