"""What meshrun costs, measured beside torchrun: ``python -m tests.bench``. Linux only."""
