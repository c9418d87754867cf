"""What only a GPU shows. ``python -m tests.gpu`` runs it from a bare checkout."""
