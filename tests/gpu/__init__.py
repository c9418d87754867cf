"""Tests that need a GPU. ``python -m tests.gpu`` runs them from a bare checkout."""
