"""Launch from a process that uses the GPU; the rank returns a CUDA tensor."""

import torch

import meshrun


def doubled(number: float) -> torch.Tensor:
    """Return a tensor on the rank's GPU."""
    return torch.full((4,), 2 * number, device="cuda")


if __name__ == "__main__":
    held = torch.ones(4, device="cuda")
    (result,) = meshrun.launch(doubled, args=(3.5,), nproc_per_node=1)
    print(f"{(held + result).tolist()} on {result.device}", flush=True)
