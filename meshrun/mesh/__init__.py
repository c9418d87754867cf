"""The mesh of this process. Nothing here imports torch before it is needed."""
