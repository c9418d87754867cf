"""Print what the current layout says about this process, without torch."""

import json
import os
import sys

from meshrun import current_layout, data_shard


def facts():
    layout = current_layout()
    derived = [flatten.name for flatten in layout.flattens]
    derived += [dim for view in layout.views for dim in view.mesh.mesh_dim_names]
    dims = list(dict.fromkeys([*layout.shape, *derived]))
    return {
        "rank": layout.own_rank,
        "layout": layout.to_dict(),
        "coordinate": list(layout.coordinate()),
        "label": layout.label(),
        "slot": list(layout.slot()),
        "groups": {dim: list(layout.group(dim)) for dim in dims},
        "dim_ranks": {dim: layout.dim_rank(dim) for dim in dims},
        "shard": list(data_shard()),
    }


if __name__ == "__main__":
    line = json.dumps({**facts(), "torch": "torch" in sys.modules})
    os.write(1, f"{line}\n".encode())  # one write: torchrun mixes halves of lines
