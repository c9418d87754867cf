"""Print the value of each expression on the command line; for a mesh, its ranks."""

import json
import sys

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from meshrun import Layout, current_layout, current_mesh, init_mesh

layout = current_layout()
rank = (layout.own_rank + 3) % layout.world_size
other = Layout.parse("4")


def plain(value):
    if isinstance(value, DeviceMesh):
        return value.mesh.flatten().tolist()
    if isinstance(value, dist.ProcessGroup):
        return dist.get_process_group_ranks(value)
    if isinstance(value, (list, tuple, range)):
        return [plain(part) for part in value]
    return value


print(json.dumps([plain(eval(expression)) for expression in sys.argv[1:]]))
