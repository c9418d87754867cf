"""Measurements of ``--check`` and their evaluation. Pure: ``worker/check_ranks.py`` measures."""
