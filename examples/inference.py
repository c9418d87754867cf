"""Inference by groups of ranks: each replica answers its share of the prompts with a cut model.

    meshrun --mesh replica=2,tp=2 examples/inference.py

Tensor parallelism cuts the model along ``tp``; the ranks of a replica generate together, and
replicas know nothing of each other until the answers are collected. Other prompts and other sizes
give the same answers.

On GPUs nothing changes. A server such as vLLM takes a replica's ranks in the same way: the group is
``current_mesh("tp").get_group()``, its members are ``current_layout().group("tp")``.
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
    """Guesses a letter from the average of those before it."""

    def __init__(self) -> None:
        """Make the layers; tensor parallelism cuts the first by columns, the second by rows."""
        super().__init__()
        self.embed = nn.Embedding(len(LETTERS), WIDTH)
        self.up = nn.Linear(WIDTH, 4 * WIDTH)
        self.down = nn.Linear(4 * WIDTH, len(LETTERS))

    def forward(self, text: torch.Tensor) -> torch.Tensor:
        """Return the scores of each letter as the next one."""
        places = torch.linspace(0.1, 1, len(text), device=text.device)[:, None]
        return self.down(self.up((self.embed(text) * places).mean(0)).relu())


@torch.inference_mode()
def generate(model: nn.Module, prompt: str, device: str) -> str:
    """Return the prompt with the likeliest letters behind it."""
    text = prompt
    while len(text) < LENGTH:
        letters = torch.tensor([LETTERS.index(letter) for letter in text], device=device)
        text += LETTERS[int(model(letters).argmax())]
    return text


def main() -> None:
    """Answer this replica's prompts, and print all answers from one rank."""
    layout, mesh = current_layout(), current_mesh()
    torch.manual_seed(0)  # every rank begins with the same weights
    model = Model().to(mesh.device_type).eval()
    whole = [generate(model, prompt, mesh.device_type) for prompt in PROMPTS]
    parallelize_module(model, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    replica, replicas = layout.dim_rank("replica"), layout.size("replica")
    answers = [generate(model, each, mesh.device_type) for each in PROMPTS[replica::replicas]]

    shares: list[list[str]] = [[] for _ in range(replicas)]
    dist.all_gather_object(shares, answers, group=mesh.get_group("replica"))
    collected = [shares[number % replicas][number // replicas] for number in range(len(PROMPTS))]
    assert collected == whole, (collected, whole)
    if dist.get_rank() == 0:
        for prompt, text in zip(PROMPTS, collected, strict=True):
            print(f"{prompt} -> {text}")


if __name__ == "__main__":
    main()
