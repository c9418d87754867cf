"""Measurements of meshrun alongside torchrun: ``python -m tests.benchmarks``. Linux only."""
