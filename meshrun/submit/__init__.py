"""A launch as a job of a scheduler: its text, and its submission."""
