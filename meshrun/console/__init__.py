"""The output of the ranks, from their streams to our stdout, stderr and log files."""
