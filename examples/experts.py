"""A mixture of experts: expert parallelism over another view of the data-parallel ranks.

    meshrun --mesh dp=4 --view moe:edp=-1,ep=2 examples/experts.py

Outside the experts, ``dp`` splits the batch over the ranks. The same four ranks are also a mesh
``edp`` x ``ep``: ``ep`` splits the experts, ``edp`` replicates them. A token travels along ``ep``
to the rank that has its expert, and back. The loss is the same for any ``ep`` that divides four.

Nothing changes on GPUs. Keep ``ep`` within a node with ``--intra-node ep``.
"""

import torch
import torch.distributed as dist
from torch import nn

from meshrun import current_layout, current_mesh

STEPS, EXPERTS, WIDTH, BATCH = 31, 4, 8, 64


class Experts(nn.Module):
    """A router that sends each token to one expert, and the experts that this rank has."""

    def __init__(self, count: int, first: int) -> None:
        """Make the same experts on every rank, and keep ``count`` of them."""
        super().__init__()
        self.router = nn.Linear(WIDTH, EXPERTS)
        experts = [
            nn.Sequential(nn.Linear(WIDTH, 32), nn.Tanh(), nn.Linear(32, WIDTH))
            for _ in range(EXPERTS)
        ]
        self.own = nn.ModuleList(experts[first : first + count])
        self.count = count

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Send each token to its expert and back, and weight the output by the router's."""
        weight, chosen = self.router(tokens).softmax(-1).max(-1)
        order = chosen.argsort(stable=True)
        # How many tokens go to each rank (row) and each of its experts (column).
        sent = torch.bincount(chosen, minlength=EXPERTS).view(-1, self.count)
        ones = [1] * len(sent)
        received = Exchange.apply(sent, ones, ones)
        to, back = sent.sum(1).tolist(), received.sum(1).tolist()
        arrived = Exchange.apply(tokens[order], to, back)
        # They arrive sorted by rank, those of each rank by expert.
        expert = torch.arange(self.count, device=tokens.device).repeat(len(back))
        expert = expert.repeat_interleave(received.flatten())
        outputs = torch.zeros_like(arrived)
        for number, network in enumerate(self.own):
            outputs = outputs.index_put((expert == number,), network(arrived[expert == number]))
        returned = Exchange.apply(outputs, back, to)
        return tokens + weight[:, None] * returned[order.argsort()]


class Exchange(torch.autograd.Function):
    """Sends ``to[r]`` rows to rank r along ``ep``, and returns the ``back[r]`` that it sends."""

    @staticmethod
    def forward(ctx, values, to, back):
        """Send rows to their ranks."""
        ctx.to, ctx.back = to, back
        received = values.new_empty((sum(back), *values.shape[1:]))
        group = current_mesh("ep").get_group()
        dist.all_to_all_single(received, values.contiguous(), back, to, group=group)
        return received

    @staticmethod
    def backward(ctx, gradient):
        """Send each row's gradient back to the rank that the row came from."""
        return Exchange.apply(gradient, ctx.back, ctx.to), None, None


def average_gradients(model: Experts, ranks: int) -> None:
    """Average the router's gradients over ``dp``, and each expert's over its copies in ``edp``."""
    experts = {id(parameter) for parameter in model.own.parameters()}
    for parameter in model.parameters():
        dim = "edp" if id(parameter) in experts else "dp"
        if parameter.grad is None:  # this expert got no tokens
            parameter.grad = torch.zeros_like(parameter)
        dist.all_reduce(parameter.grad, group=current_mesh(dim).get_group())
        parameter.grad /= ranks  # for experts too: each has had the tokens of its whole ep group


def main() -> None:
    """Train and print the loss from one rank."""
    layout, mesh = current_layout(), current_mesh("dp")
    count = EXPERTS // layout.size("ep")
    torch.manual_seed(0)  # the same weights on every rank
    model = Experts(count, layout.dim_rank("ep") * count).to(mesh.device_type)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    generator = torch.Generator().manual_seed(0)
    for step in range(STEPS):
        batch = torch.rand(BATCH, WIDTH, generator=generator) * 2 - 1
        tokens = batch.chunk(layout.size("dp"))[layout.dim_rank("dp")].to(mesh.device_type)
        loss = nn.functional.mse_loss(model(tokens), tokens.flip(1))
        optimizer.zero_grad()
        loss.backward()
        average_gradients(model, layout.size("dp"))
        optimizer.step()
        if step % 10 == 0:
            shown = loss.detach().clone()
            dist.all_reduce(shown, group=mesh.get_group())
            if dist.get_rank() == 0:
                print(f"step {step:2d}  loss {shown.item() / layout.size('dp'):.4f}")


if __name__ == "__main__":
    main()
