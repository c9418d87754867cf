"""Launches on a Ray cluster: a placement group, and an actor on each node that runs an agent."""
