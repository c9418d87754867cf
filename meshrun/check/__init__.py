"""What ``--check`` measures and how it is judged. Pure: ``worker/check_ranks.py`` measures."""
