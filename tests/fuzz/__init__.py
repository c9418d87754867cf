"""Coverage-guided fuzzing, and tests of its targets."""
