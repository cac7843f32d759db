"""The small net that all runs train: odd sizes, so that no split over ranks comes out even."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

VOCAB, WIDTH, HIDDEN, BLOCKS, LENGTH, GLOBAL_BATCH = 31, 13, 60, 2, 8, 12
WEIGHT_DECAY = 0.1
FROZEN = ("blocks.0.up.weight", "blocks.1.norm.bias")


@dataclass(frozen=True)
class ModelOptions:
    """The parts of the net that a case can switch on."""

    tie: bool = False
    buffers: bool = False
    tiny: bool = False
    frozen: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """A plain dict, so that a test can hand a truth file's options to resume.py."""
        return asdict(self) | {"frozen": list(self.frozen)}

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> "ModelOptions":
        """The other way round."""
        return cls(**{**values, "frozen": tuple(values.get("frozen", ()))})


RICH = ModelOptions(tie=True, buffers=True, tiny=True, frozen=FROZEN)


class MixedBatchNorm(nn.BatchNorm1d):
    """BatchNorm whose input may have another dtype than its buffers, as happens in 16-bit runs."""

    def forward(self, x: Tensor) -> Tensor:
        """Compute in the dtype of the running statistics."""
        mean, var, count = self.running_mean, self.running_var, self.num_batches_tracked
        assert mean is not None and count is not None and self.momentum is not None
        count.add_(1)
        weight, bias = self.weight.to(mean.dtype), self.bias.to(mean.dtype)
        y = F.batch_norm(
            x.to(mean.dtype), mean, var, weight, bias, self.training, self.momentum, self.eps
        )
        return y.to(x.dtype)


class Block(nn.Module):
    """LayerNorm and a two-layer perceptron around a residual."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, HIDDEN)
        self.down = nn.Linear(HIDDEN, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """Add the perceptron's output to the input."""
        y: Tensor = self.down(F.gelu(self.up(self.norm(x))))
        return x + y


class Net(nn.Module):
    """Embedding, blocks and a head; returns the loss, as DeepSpeed likes it."""

    scale: Tensor
    ramp: Tensor

    def __init__(self, options: ModelOptions) -> None:
        super().__init__()
        self.options = options.to_json()
        self.emb = nn.Embedding(VOCAB, WIDTH)
        nn.init.normal_(self.emb.weight, std=0.3)
        if options.buffers:  # not after a bias: its gradient would be noise, blown up by Adam
            self.bn = MixedBatchNorm(WIDTH)
            self.register_buffer("scale", torch.tensor(1.5))
            self.register_buffer("ramp", torch.linspace(0, 1, 5), persistent=False)
        self.blocks = nn.ModuleList(Block() for _ in range(BLOCKS))
        if options.tiny:  # fewer elements than ranks, or than the alignment of a partition
            self.gain = nn.Parameter(torch.ones(1))
            self.shift = nn.Parameter(torch.zeros(5))
        self.head = nn.Linear(WIDTH, VOCAB, bias=False)
        if options.tie:
            self.head.weight = self.emb.weight

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        """Mean cross entropy of the next token."""
        h = self.emb(x)
        if self.options["buffers"]:
            h = self.bn(h.flatten(0, 1)).unflatten(0, h.shape[:2])
            h = h * self.scale.to(h.dtype) + self.ramp.mean().to(h.dtype)
        for block in self.blocks:
            h = block(h)
        if self.options["tiny"]:
            h = h * self.gain + F.pad(self.shift, (0, WIDTH - 5))
        return F.cross_entropy(self.head(h).float().flatten(0, 1), y.flatten())


def build(options: ModelOptions, seed: int = 1234) -> Net:
    """The net with the weights that belong to the seed."""
    torch.manual_seed(seed)
    net = Net(options)
    for name, parameter in net.named_parameters():
        parameter.requires_grad_(name not in options.frozen)
    return net


def batch(step: int, rank: int = 0, world: int = 1) -> tuple[Tensor, Tensor]:
    """This rank's rows of the step's global batch; the rows do not depend on the split."""
    generator = torch.Generator().manual_seed(1000 + step)
    tokens = torch.randint(0, VOCAB, (GLOBAL_BATCH, LENGTH + 1), generator=generator)
    per = GLOBAL_BATCH // world
    mine = tokens[rank * per : (rank + 1) * per]
    return mine[:, :-1].contiguous(), mine[:, 1:].contiguous()


def decay_groups(net: nn.Module) -> list[tuple[list[str], float]]:
    """Names and weight decay of the two groups; taken before wrapping, which may flatten shapes."""
    trained = [(name, p.ndim) for name, p in net.named_parameters() if p.requires_grad]
    matrices = [name for name, ndim in trained if ndim > 1]
    vectors = [name for name, ndim in trained if ndim <= 1]
    return [(matrices, WEIGHT_DECAY), (vectors, 0.0)]


def tied_names(net: nn.Module) -> dict[str, str]:
    """Second name -> first name of every parameter that has two."""
    first: dict[int, str] = {}
    tied: dict[str, str] = {}
    for name, parameter in net.named_parameters(remove_duplicate=False):
        if first.setdefault(id(parameter), name) != name:
            tied[name] = first[id(parameter)]
    return tied


def nonpersistent_buffers(net: nn.Module, saved: Sequence[str]) -> list[str]:
    """Buffers that a state dict leaves out."""
    return sorted({name for name, _ in net.named_buffers()} - set(saved))
