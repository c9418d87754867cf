"""Print what current_mesh() returns on each rank."""

import json
import os
import sys
import threading

import torch
import torch.distributed as dist

from meshrun import current_mesh, has_mesh

before = has_mesh()
mesh = current_mesh()
total = torch.tensor([float(dist.get_rank())])
dist.all_reduce(total, group=current_mesh("tp").get_group())
seen = []
thread = threading.Thread(target=lambda: seen.append(current_mesh()))
thread.start()
thread.join()
sys.stdout.write(  # one write: torchrun mixes halves of lines
    json.dumps(
        {
            "rank": dist.get_rank(),
            "type": type(mesh).__module__ + "." + type(mesh).__name__,
            "shape": list(mesh.shape),
            "names": list(mesh.mesh_dim_names),
            "coordinate": list(mesh.get_coordinate()),
            "device": mesh.device_type,
            "tp_sum": total.item(),
            "same": current_mesh("tp") is current_mesh("tp")
            and current_mesh("dp", "tp") is current_mesh()
            and seen[0] is mesh,
            "before": before,
            "local_rank": os.environ.get("LOCAL_RANK"),
            "threads": torch.get_num_threads(),
        }
    )
    + "\n"
)
