"""What the programs in this folder share: data, a model, and a report of the training."""

import json
import os

import torch
import torch.distributed as dist


def batches(count=2):
    """Return batches of a linear function, different on each rank."""
    generator = torch.Generator().manual_seed(100 + int(os.environ["RANK"]))
    inputs = torch.rand(count * 4, 3, generator=generator)
    return list(zip(inputs.split(4), inputs.sum(1, keepdim=True).split(4), strict=True))


def model():
    """Return a model that has the same initial weights everywhere."""
    torch.manual_seed(0)
    return torch.nn.Linear(3, 1)


def flat(module):
    """Return all parameters as one tensor."""
    return torch.cat([value.detach().flatten() for value in module.parameters()]).clone()


def report(before, after, **more):
    """Print this rank's findings in one line."""
    found = {
        "rank": dist.get_rank(),
        "world": dist.get_world_size(),
        "backend": dist.get_backend(),
        "trained": not torch.equal(before, after),
        "weights": [round(value, 6) for value in after.tolist()[:8]],
        **more,
    }
    os.write(1, f"{json.dumps(found)}\n".encode())
