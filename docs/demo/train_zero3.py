"""Trains a tiny random Llama under DeepSpeed ZeRO-3 and keeps its logits for a later comparison.

Started by run.sh with torchrun. The input and output embeddings are tied: they are one tensor in
memory, and one entry in a correct Hugging Face folder.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

os.environ.setdefault("DS_ACCELERATOR", "cpu")  # read by deepspeed while it is imported

import deepspeed
import torch
import torch.distributed as dist
from safetensors.torch import save_file
from transformers import LlamaConfig, LlamaForCausalLM

STEPS = 5
BATCH_SIZE = 4
SEQUENCE_LENGTH = 32

LLAMA = LlamaConfig(
    vocab_size=1024,
    hidden_size=128,
    intermediate_size=384,
    num_hidden_layers=4,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=128,
    tie_word_embeddings=True,
    bos_token_id=0,
    eos_token_id=1,
)

DEEPSPEED = {
    "train_micro_batch_size_per_gpu": BATCH_SIZE,
    "zero_optimization": {"stage": 3},
    "steps_per_print": 1_000_000,
}


def token_batch(rank: int, step: int) -> torch.Tensor:
    """Token ids [BATCH_SIZE, SEQUENCE_LENGTH], another batch for every rank and step."""
    generator = torch.Generator().manual_seed(1000 * rank + step)
    size = (BATCH_SIZE, SEQUENCE_LENGTH)
    return torch.randint(LLAMA.vocab_size, size, generator=generator)


def train(engine: deepspeed.DeepSpeedEngine, rank: int) -> None:
    """Takes `STEPS` optimizer steps."""
    for step in range(STEPS):
        tokens = token_batch(rank, step)
        loss = engine(input_ids=tokens, labels=tokens).loss
        engine.backward(loss)
        engine.step()
        if rank == 0:
            print(f"step {step + 1}/{STEPS}  loss {loss.item():.4f}", flush=True)


def gather_plain_model(engine: deepspeed.DeepSpeedEngine, rank: int) -> LlamaForCausalLM | None:
    """The trained model as an ordinary, unsharded one on rank 0; None on the other ranks."""
    parameters = dict(engine.module.named_parameters())
    with deepspeed.zero.GatheredParameters(list(parameters.values())):
        if rank != 0:
            return None
        full = {name: parameter.detach().clone() for name, parameter in parameters.items()}
    model = LlamaForCausalLM(LLAMA)
    missing, unexpected = model.load_state_dict(full, strict=False)
    if unexpected or set(missing) - {"lm_head.weight"}:  # the head is the embedding
        raise RuntimeError(f"gathered parameters do not fit: {missing=} {unexpected=}")
    return model.eval()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("run", type=Path, help="folder for the DeepSpeed checkpoint")
    parser.add_argument("config", type=Path, help="folder for the model's config.json")
    parser.add_argument("logits", type=Path, help="file for the fixed input and its logits")
    arguments = parser.parse_args()

    # Plain gloo: without this DeepSpeed first compiles a C++ operator for all_reduce on CPU.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed(dist_backend="gloo", verbose=False)
    rank = dist.get_rank()
    torch.set_num_threads(1)  # the comparison is exact only if sums are taken in one order
    torch.manual_seed(0)
    model = LlamaForCausalLM(LLAMA)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=DEEPSPEED)

    train(engine, rank)
    engine.save_checkpoint(str(arguments.run))

    plain = gather_plain_model(engine, rank)
    if plain is not None:
        count = sum(parameter.numel() for parameter in plain.parameters())
        print(f"{count:,} parameters, {dist.get_world_size()} ranks", flush=True)
        plain.config.save_pretrained(arguments.config)
        tokens = token_batch(rank=99, step=0)
        with torch.no_grad():
            logits = plain(input_ids=tokens).logits
        save_file({"input_ids": tokens, "logits": logits}, arguments.logits)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
