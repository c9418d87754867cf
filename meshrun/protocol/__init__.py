"""What the processes of a launch send each other: events, results, and their encodings."""
