"""What is asked for and what is decided before anything starts, as values."""
