"""The running launcher: one loop that waits for events and carries out actions."""
