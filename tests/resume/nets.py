"""The two nets of the matrix: a transformer's parts with tied weights, and one with convolutions.

Their losses do not depend on how the rows are split over the ranks, so that a job can be followed
to another world size.
"""

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from training.model import VOCAB, ModelOptions
from training.model import Block as TransformerBlock
from training.model import build as build_transformer

CHANNELS, STEM_CHANNELS = 7, 5
TRANSFORMER = ModelOptions(tie=True, tiny=True)
FROZEN_PART = "stem"


class Mean(torch.autograd.Function):
    """The mean over the ranks, through which gradients go to all of them."""

    @staticmethod
    def forward(ctx: Any, mine: Tensor) -> Tensor:
        """The same on every rank."""
        return _mean(mine)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        """Every rank's loss depends on every rank's rows."""
        return _mean(gradients[0])


def _mean(tensor: Tensor) -> Tensor:
    total = tensor.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(total)
    return total / dist.get_world_size()


class WholeBatchNorm(nn.BatchNorm2d):
    """BatchNorm over the rows of all ranks: what SyncBatchNorm does, which needs a GPU."""

    def forward(self, x: Tensor) -> Tensor:
        """Normalise `(rows, channels, height, width)`; in training by the moments of all ranks."""
        mean, var = self.running_mean, self.running_var
        assert mean is not None and var is not None
        if self.training:
            mean, var = self._moments(x)
        scale = self.weight * torch.rsqrt(var + self.eps)
        return x * scale[:, None, None] + (self.bias - mean * scale)[:, None, None]

    def _moments(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Mean and variance of each channel, noted in the running statistics."""
        moments = torch.stack((x.mean((0, 2, 3)), (x * x).mean((0, 2, 3))))
        world = dist.get_world_size() if dist.is_initialized() else 1
        if world > 1:
            moments = Mean.apply(moments)
        mean, var = moments[0], moments[1] - moments[0] ** 2
        count = world * x.numel() // x.shape[1]
        mine = self.running_mean, self.running_var, self.num_batches_tracked
        assert mine[0] is not None and mine[1] is not None and mine[2] is not None
        with torch.no_grad():
            mine[0].lerp_(mean, 0.1)
            mine[1].lerp_(var * count / (count - 1), 0.1)
            mine[2].add_(1)
        return mean, var


class ConvBlock(nn.Module):
    """A convolution and BatchNorm around a residual."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(CHANNELS, CHANNELS, 3, padding=1, bias=False)
        self.norm = WholeBatchNorm(CHANNELS)

    def forward(self, x: Tensor) -> Tensor:
        """Add the convolution's output to the input."""
        y: Tensor = self.norm(self.conv(x))
        return x + F.gelu(y)


class ConvNet(nn.Module):
    """A frozen stem with given statistics, as in fine-tuning, blocks and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(1, STEM_CHANNELS, 3, padding=1), nn.BatchNorm2d(STEM_CHANNELS), nn.GELU()
        )
        self.widen = nn.Conv2d(STEM_CHANNELS, CHANNELS, 1, bias=False)
        self.norm = WholeBatchNorm(CHANNELS)
        self.blocks = nn.ModuleList(ConvBlock() for _ in range(2))
        self.head = nn.Linear(CHANNELS * 4, VOCAB)

    def train(self, mode: bool = True) -> "ConvNet":
        """The stem stays in evaluation mode: its statistics are part of the loss."""
        super().train(mode)
        self.stem.eval()
        return self

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        """Mean cross entropy of the token after the first, with the tokens one-hot for an image."""
        h = F.one_hot(x, VOCAB).float()[:, None]
        h = self.norm(self.widen(self.stem(h)))
        for block in self.blocks:
            h = block(h)
        pooled = F.adaptive_avg_pool2d(h, 2).flatten(1)
        return F.cross_entropy(self.head(pooled), y[:, 0])


NETS = ("transformer", "convolutional")
BLOCKS: set[type[nn.Module]] = {TransformerBlock, ConvBlock}
"""The modules that FSDP wraps."""


def build(net: str, seed: int) -> nn.Module:
    """The net with the weights and, where frozen, the statistics that belong to the seed."""
    if net == "transformer":
        return build_transformer(TRANSFORMER, seed)
    torch.manual_seed(seed)
    made = ConvNet()
    statistics = made.stem[1]
    assert isinstance(statistics, nn.BatchNorm2d)
    assert statistics.running_mean is not None and statistics.running_var is not None
    statistics.running_mean.normal_(std=0.3)
    statistics.running_var.uniform_(0.5, 1.5)
    made.stem.requires_grad_(False)
    return made.train()
