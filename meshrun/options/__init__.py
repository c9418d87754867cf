"""Every option of the command line."""
