"""The tests of meshrun."""
