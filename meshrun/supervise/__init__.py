"""The launcher at work: one pure state machine, one loop that acts, one console."""
