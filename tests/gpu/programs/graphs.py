"""Capture a CUDA graph that contains a collective of the mesh, and replay it."""

import torch
import torch.distributed as dist

from meshrun import current_mesh

mesh = current_mesh()
group = mesh.get_group("tp")
values = torch.ones(1024, device="cuda")
dist.all_reduce(values, group=group)  # creates the communicator before the capture
torch.cuda.synchronize()
graph = torch.cuda.CUDAGraph()
with torch.cuda.graph(graph):
    doubled = values * 2
    dist.all_reduce(doubled, group=group)
for number in range(3):
    values.fill_(number)
    graph.replay()
torch.cuda.synchronize()
print(f"replayed {doubled[0].item() / mesh['tp'].size():g}", flush=True)
