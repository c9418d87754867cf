"""Coverage-guided fuzzing, and that its targets hold."""
