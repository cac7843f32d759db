"""Writes a real training checkpoint of a decoder-only transformer after one optimizer step.

Started with torchrun, on CPU. `zero3` is what DeepSpeed's ZeRO-3 saves, in fp32; `dcp` is what
FSDP2 saves with torch.distributed.checkpoint under the keys "model" and "optimizer". Both hold
the weights and the two moments of AdamW. Only the number of layers depends on --millions.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

os.environ.setdefault("DS_ACCELERATOR", "cpu")  # read by deepspeed while it is imported

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

WIDTH = 1024
HEADS = 16
VOCABULARY = 16_384
CONTEXT = 512
BATCH_SIZE = 1
SEQUENCE_LENGTH = 16


class Block(nn.Module):
    """Attention and a feed-forward net, each behind a norm and beside a residual."""

    def __init__(self) -> None:
        super().__init__()
        self.norm_1 = nn.LayerNorm(WIDTH)
        self.attention = nn.Linear(WIDTH, 3 * WIDTH)
        self.projection = nn.Linear(WIDTH, WIDTH)
        self.norm_2 = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 4 * WIDTH)
        self.down = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, hidden: Tensor) -> Tensor:
        batch, length, _ = hidden.shape
        heads = self.attention(self.norm_1(hidden)).view(batch, length, 3 * HEADS, -1)
        query, key, value = heads.transpose(1, 2).chunk(3, dim=1)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        hidden = hidden + self.projection(mixed.transpose(1, 2).reshape(batch, length, WIDTH))
        return hidden + self.down(F.gelu(self.up(self.norm_2(hidden))))


class Decoder(nn.Module):
    """A plain GPT with about `millions` million parameters; input and output are not tied."""

    def __init__(self, millions: int) -> None:
        super().__init__()
        layer_size = 12 * WIDTH * WIDTH
        layer_count = max(1, round((millions * 1_000_000 - 2 * VOCABULARY * WIDTH) / layer_size))
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.positions = nn.Embedding(CONTEXT, WIDTH)
        self.layers = nn.ModuleList(Block() for _ in range(layer_count))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        hidden = self.tokens(ids) + self.positions.weight[: ids.shape[1]]
        for layer in self.layers:
            hidden = layer(hidden)
        return F.cross_entropy(self.head(self.norm(hidden)).flatten(0, 1), ids.flatten())


def make_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)


def write_zero3(millions: int, ids: Tensor, folder: Path) -> nn.Module:
    import deepspeed

    # Plain gloo: without this DeepSpeed first compiles a C++ operator for all_reduce on CPU.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed(dist_backend="gloo", verbose=False)
    config = {
        "train_micro_batch_size_per_gpu": BATCH_SIZE,
        "zero_optimization": {"stage": 3, "reduce_bucket_size": 20_000_000},
        "steps_per_print": 1_000_000,
    }
    with deepspeed.zero.Init(config_dict_or_path=config):  # no rank ever holds the whole model
        model = Decoder(millions)
    engine, *_ = deepspeed.initialize(model=model, optimizer=make_optimizer(model), config=config)
    engine.backward(engine(ids))
    engine.step()
    engine.save_checkpoint(str(folder))
    return model


def write_dcp(millions: int, ids: Tensor, folder: Path) -> nn.Module:
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_state_dict
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    model = Decoder(millions)
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = make_optimizer(model)
    model(ids).backward()
    optimizer.step()
    optimizer.zero_grad()
    model_state, optimizer_state = get_state_dict(model, optimizer)
    dcp.save({"model": model_state, "optimizer": optimizer_state}, checkpoint_id=folder)
    return model


WRITERS = {"zero3": write_zero3, "dcp": write_dcp}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("kind", choices=WRITERS)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--millions", type=int, default=250, help="parameters (default: 250)")
    arguments = parser.parse_args()

    dist.init_process_group("gloo")
    generator = torch.Generator().manual_seed(dist.get_rank())
    ids = torch.randint(VOCABULARY, (BATCH_SIZE, SEQUENCE_LENGTH), generator=generator)
    torch.manual_seed(0)
    model = WRITERS[arguments.kind](arguments.millions, ids, arguments.folder)
    if dist.get_rank() == 0:
        sizes = (getattr(p, "ds_numel", p.numel()) for p in model.parameters())
        count = sum(sizes)
        print(f"{arguments.kind}: {count / 1e6:.0f} M parameters", flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
