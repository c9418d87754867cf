"""Use only the mesh."""

from meshrun import current_mesh

print(current_mesh().shape)
