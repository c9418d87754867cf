"""meshrun.launch(): the command line for programs."""
