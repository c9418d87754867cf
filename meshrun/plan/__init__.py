"""The launch request, and the plan made from it before anything starts, as values."""
