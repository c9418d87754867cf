"""The command line: options -> a request -> what is to be done."""
