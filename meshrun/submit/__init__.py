"""A launch as a job of a scheduler: what is handed in, and handing it in."""
