"""The launcher at work: one loop that waits for events and carries out actions."""
