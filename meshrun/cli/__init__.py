"""The command line: options -> a request -> a launch, a plan or a job."""
