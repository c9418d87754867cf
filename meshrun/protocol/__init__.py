"""What the processes of a launch tell each other: events, results, and how both travel."""
