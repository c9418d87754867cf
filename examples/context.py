"""Context parallelism: each rank has a part of every sequence, and attends to all of it.

    meshrun --mesh dp=2,cp=2 examples/context.py

Queries stay where they are; keys and values are gathered along ``cp``, and their gradients go back
the same way. Every rank compares its part with attention over the whole sequence.

On GPUs only the attention changes: put ``context_parallel(current_mesh("cp"), ...)`` of
``torch.distributed.tensor.experimental`` around ``scaled_dot_product_attention``. It passes keys
and values round a ring with the flash kernels, so that no rank holds all of them.
"""

import torch
import torch.distributed as dist
from torch.nn.functional import scaled_dot_product_attention

from meshrun import current_layout, current_mesh

BATCH, HEADS, LENGTH, WIDTH = 4, 2, 32, 8


class Gather(torch.autograd.Function):
    """Joins the parts that the ranks along ``cp`` have of a sequence."""

    @staticmethod
    def forward(_ctx, part):
        """Return all parts, in the order of ranks."""
        parts = [torch.empty_like(part) for _ in range(current_layout().size("cp"))]
        dist.all_gather(parts, part.contiguous(), group=current_mesh("cp").get_group())
        return torch.cat(parts, dim=2)

    @staticmethod
    def backward(_ctx, gradient):
        """Return what all ranks together have found for this rank's part."""
        layout, total = current_layout(), gradient.contiguous()
        dist.all_reduce(total, group=current_mesh("cp").get_group())
        return total.chunk(layout.size("cp"), dim=2)[layout.dim_rank("cp")]


def attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """Return causal attention of this rank's queries over the keys of all ranks along ``cp``."""
    layout, keys, values = current_layout(), Gather.apply(key), Gather.apply(value)
    places = torch.arange(keys.shape[2], device=key.device)
    own = places.chunk(layout.size("cp"))[layout.dim_rank("cp")]
    return scaled_dot_product_attention(query, keys, values, attn_mask=own[:, None] >= places)


def main() -> None:
    """Attend to a part, and compare it and its gradients with the whole."""
    layout, mesh = current_layout(), current_mesh()
    part, parts = layout.dim_rank("cp"), layout.size("cp")
    torch.manual_seed(layout.dim_rank("dp"))  # ranks along cp share their sequences
    whole = torch.randn(3, BATCH, HEADS, LENGTH, WIDTH).to(mesh.device_type).requires_grad_()
    own = whole.detach().chunk(parts, dim=3)[part].requires_grad_()

    expected = scaled_dot_product_attention(*whole, is_causal=True)
    expected.square().sum().backward()
    found = attend(*own)
    found.square().sum().backward()

    apart = (found - expected.chunk(parts, dim=2)[part]).abs().max()
    gradients = (own.grad - whole.grad.chunk(parts, dim=3)[part]).abs().max()
    worst = torch.stack([apart, gradients])
    dist.all_reduce(worst, op=dist.ReduceOp.MAX)
    assert worst.max() < 1e-4, worst
    print(
        f"tokens {part * LENGTH // parts} to {(part + 1) * LENGTH // parts - 1} are as in the whole"
    )


if __name__ == "__main__":
    main()
