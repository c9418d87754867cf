"""torch.compile, forward and backward."""

import torch


@torch.compile
def loss_of(weights: torch.Tensor, points: torch.Tensor) -> torch.Tensor:
    """Return a number that depends on all of them."""
    return (points @ weights).relu().square().mean()


torch.manual_seed(0)
weights = torch.randn(64, 64, device="cuda", requires_grad=True)
points = torch.randn(256, 64, device="cuda")
loss = loss_of(weights, points)
loss.backward()
expected = (points @ weights).relu().square().mean()
torch.testing.assert_close(loss, expected)
print("compiled", weights.grad is not None, flush=True)
