"""Inference by groups of ranks: each replica completes its share of the prompts.

    meshrun --mesh replica=2,tp=2 examples/inference.py

Tensor parallelism splits the model along ``tp``, so the ranks of a replica generate together;
replicas work independently until their outputs are gathered. The outputs are the same on a mesh
of any size.

Nothing changes on GPUs. A server such as vLLM can use a replica's ranks in the same way: the group
is ``current_mesh("tp").get_group()``, its ranks are ``current_layout().group("tp")``.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

from meshrun import current_layout, current_mesh

LETTERS, WIDTH, LENGTH = "abcdefgh", 32, 12
PROMPTS = ("a", "bad", "cab", "deaf", "e", "feed", "gag")


class Model(nn.Module):
    """Predicts the next letter from a weighted mean of those before it."""

    def __init__(self) -> None:
        """Make the layers: ``up`` is split by columns, ``down`` by rows."""
        super().__init__()
        self.embed = nn.Embedding(len(LETTERS), WIDTH)
        self.up = nn.Linear(WIDTH, 4 * WIDTH)
        self.down = nn.Linear(4 * WIDTH, len(LETTERS))

    def forward(self, text: torch.Tensor) -> torch.Tensor:
        """Return the logits of the next letter."""
        weights = torch.linspace(0.1, 1, len(text), device=text.device)[:, None]
        return self.down(self.up((self.embed(text) * weights).mean(0)).relu())


@torch.inference_mode()
def generate(model: nn.Module, prompt: str, device: str) -> str:
    """Return the prompt, completed with the likeliest letters."""
    text = prompt
    while len(text) < LENGTH:
        letters = torch.tensor([LETTERS.index(letter) for letter in text], device=device)
        text += LETTERS[int(model(letters).argmax())]
    return text


def main() -> None:
    """Complete this replica's prompts, and print those of all replicas from one rank."""
    layout, mesh = current_layout(), current_mesh()
    torch.manual_seed(0)  # the same weights on every rank
    model = Model().to(mesh.device_type).eval()
    expected = [generate(model, prompt, mesh.device_type) for prompt in PROMPTS]
    parallelize_module(model, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    replica, replicas = layout.dim_rank("replica"), layout.size("replica")
    texts = [generate(model, prompt, mesh.device_type) for prompt in PROMPTS[replica::replicas]]

    shares: list[list[str]] = [[] for _ in range(replicas)]
    dist.all_gather_object(shares, texts, group=mesh.get_group("replica"))
    gathered = [shares[number % replicas][number // replicas] for number in range(len(PROMPTS))]
    assert gathered == expected, (gathered, expected)
    if dist.get_rank() == 0:
        for prompt, text in zip(PROMPTS, gathered, strict=True):
            print(f"{prompt} -> {text}")


if __name__ == "__main__":
    main()
