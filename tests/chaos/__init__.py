"""Launches that a random fault hits at a random moment, and what must hold in every case."""
