"""Libraries that detect their launcher, each in a small training program on CPUs."""
