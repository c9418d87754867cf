"""The ranks' output on its way to our own stdout, stderr and log files."""
