"""meshrun.launch(): the command line as a function."""
