"""Context parallelism: each rank has a part of every sequence and attends to all of it.

    meshrun --mesh dp=2,cp=2 examples/context.py

Queries stay on their rank; keys and values are gathered along ``cp``, and their gradients return
the same way. Every rank checks its part against attention over the whole sequence.

On GPUs, long sequences call for ``context_parallel(current_mesh("cp"), ...)`` of
``torch.distributed.tensor.experimental``: it splits the sequences and passes keys and values round
a ring, so that no rank holds all of them.
"""

import torch
import torch.distributed as dist
from torch.nn.functional import scaled_dot_product_attention

from meshrun import current_layout, current_mesh

BATCH, HEADS, LENGTH, WIDTH = 4, 2, 32, 8


class Gather(torch.autograd.Function):
    """Concatenates the parts of a sequence that the ranks along ``cp`` have."""

    @staticmethod
    def forward(_ctx, part):
        """Return the whole sequence."""
        parts = [torch.empty_like(part) for _ in range(current_layout().size("cp"))]
        dist.all_gather(parts, part.contiguous(), group=current_mesh("cp").get_group())
        return torch.cat(parts, dim=2)

    @staticmethod
    def backward(_ctx, gradient):
        """Return the gradient of this rank's part, summed over the ranks that used it."""
        layout, total = current_layout(), gradient.contiguous()
        dist.all_reduce(total, group=current_mesh("cp").get_group())
        return total.chunk(layout.size("cp"), dim=2)[layout.dim_rank("cp")]


def attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """Return causal attention of this rank's queries over the keys of all ranks along ``cp``."""
    layout, keys, values = current_layout(), Gather.apply(key), Gather.apply(value)
    positions = torch.arange(keys.shape[2], device=key.device)
    own = positions.chunk(layout.size("cp"))[layout.dim_rank("cp")]
    return scaled_dot_product_attention(query, keys, values, attn_mask=own[:, None] >= positions)


def main() -> None:
    """Compare the outputs and gradients of this rank's part with those of the whole sequence."""
    layout, mesh = current_layout(), current_mesh()
    part, parts = layout.dim_rank("cp"), layout.size("cp")
    torch.manual_seed(layout.dim_rank("dp"))  # ranks along cp share their sequences
    whole = torch.randn(3, BATCH, HEADS, LENGTH, WIDTH).to(mesh.device_type).requires_grad_()
    own = whole.detach().chunk(parts, dim=3)[part].requires_grad_()

    expected = scaled_dot_product_attention(*whole, is_causal=True)
    expected.square().sum().backward()
    found = attend(*own)
    found.square().sum().backward()

    close = {"rtol": 0.0, "atol": 1e-4}
    torch.testing.assert_close(found, expected.chunk(parts, dim=2)[part], **close)
    torch.testing.assert_close(own.grad, whole.grad.chunk(parts, dim=3)[part], **close)
    first, last = part * LENGTH // parts, (part + 1) * LENGTH // parts - 1
    print(f"tokens {first} to {last} match the whole sequence")


if __name__ == "__main__":
    main()
