"""What meshrun costs, measured beside torchrun: ``python -m tests.benchmarks``. Linux only."""
