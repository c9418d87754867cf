"""Launches that are hit at a drawn moment: what may never happen, whatever is hit."""
