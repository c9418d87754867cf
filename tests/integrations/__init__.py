"""Libraries that look for a launcher, each in a small training program on CPUs."""
