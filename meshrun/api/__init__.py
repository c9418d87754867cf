"""Launches from Python: ``meshrun.launch()``, groups of workers, prompts, and pytest on ranks."""
