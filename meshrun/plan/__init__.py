"""The request, and the plan that is made from it before anything starts, as values."""
