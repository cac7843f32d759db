"""Trains under DDP with transformers' Trainer and with accelerate, which save as they do.

torchrun --standalone --nproc-per-node W tests/training/trainer_ddp.py JOBS.json

The only job is `{"out": FOLDER}`. FOLDER gets a folder a run, each with its truth, as truth.py
reads it, and what the framework left: `trainer` and `trainer_tied` (head and embedding are one
weight) have `checkpoint-3`, `trainer_shards` the same with weights in shards, `accelerate` and
`accelerate_bin` have `ckpt`.
Every matrix of the net but embedding and head has the same shape, so that nothing but the order
tells its optimizer states apart.
"""

import json
import os
import shutil
import sys
from pathlib import Path
from typing import Any

os.environ |= {"HF_HUB_OFFLINE": "1"}
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch.optim import Optimizer
from torch.utils.data import DataLoader, Dataset

from training.leaving import run_and_leave
from training.live import clean, gather, group_meta, group_names, rank

STEPS, BATCH, LENGTH, VOCAB, WIDTH = 3, 2, 8, 31, 16
SHARD = "9KB"


class Tokens(Dataset[dict[str, torch.Tensor]]):
    """Rows that a seed makes."""

    def __init__(self) -> None:
        self.rows = torch.randint(
            0, VOCAB, (64, LENGTH), generator=torch.Generator().manual_seed(7)
        )

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.rows[index], "labels": self.rows[index]}


def build(*, is_tied: bool = False) -> Any:
    """A Llama of two blocks whose matrices are all square and of one size."""
    from transformers import LlamaConfig, LlamaForCausalLM

    special = {"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0}
    config = LlamaConfig(
        vocab_size=VOCAB, hidden_size=WIDTH, intermediate_size=WIDTH, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=2, tie_word_embeddings=is_tied, **special,
    )  # fmt: skip
    return LlamaForCausalLM(config)


def write_truth(model: Any, optimizer: Optimizer, folder: Path) -> None:
    """What stands in the live model and optimizer."""
    if rank() != 0:
        return
    named = dict(model.named_parameters())
    owners = {id(param): clean(name) for name, param in named.items()}
    tied = {
        clean(name): owners[id(param)]
        for name, param in model.named_parameters(remove_duplicate=False)
        if owners[id(param)] != clean(name)
    }
    folder.mkdir(parents=True, exist_ok=True)
    save_file(gather(model, optimizer), folder / "truth.safetensors")
    groups = group_meta(optimizer, group_names(model, optimizer))
    (folder / "truth.json").write_text(json.dumps({"param_groups": groups, "tied": tied}))


def train_with_trainer(folder: Path, *, is_tied: bool) -> Any:
    """Three steps; two param groups, with weight decay and without."""
    from transformers import Trainer, TrainerCallback, TrainingArguments

    class AtTheEnd(TrainerCallback):
        """Looks at the live objects after the last step, before the save."""

        def on_step_end(self, _args: Any, state: Any, _control: Any, **live: Any) -> None:
            if state.global_step == STEPS:
                write_truth(live["model"], live["optimizer"], folder)

    torch.manual_seed(1)
    arguments = TrainingArguments(
        output_dir=str(folder),
        per_device_train_batch_size=BATCH,
        max_steps=STEPS,
        learning_rate=1e-2,
        weight_decay=0.1,
        save_steps=STEPS,
        report_to=[],
        disable_tqdm=True,
        use_cpu=True,
        ddp_backend="gloo",
    )
    model = build(is_tied=is_tied)
    trainer = Trainer(model=model, args=arguments, train_dataset=Tokens(), callbacks=[AtTheEnd()])
    trainer.train()
    return model


def save_shards(model: Any, whole: Path, folder: Path) -> None:
    """The run's folder again, with weights as transformers saves those that are too large."""
    if rank() != 0:
        return
    shutil.copytree(whole, folder)
    (folder / "checkpoint-3" / "model.safetensors").unlink()
    model.save_pretrained(folder / "checkpoint-3", max_shard_size=SHARD)


def train_with_accelerate(root: Path) -> None:
    """Three steps, then a save of each kind."""
    from accelerate import Accelerator

    torch.manual_seed(2)
    accelerator = Accelerator(cpu=True)
    model = build()
    matrices = [p for p in model.parameters() if p.dim() > 1]
    vectors = [p for p in model.parameters() if p.dim() == 1]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    optimizer: Any = torch.optim.AdamW(groups, lr=1e-2)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.5)
    loader = DataLoader(Tokens(), batch_size=BATCH, shuffle=True)
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
    for _, rows in zip(range(STEPS), loader, strict=False):
        accelerator.backward(model(**rows).loss)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
    for name, is_safe in (("accelerate", True), ("accelerate_bin", False)):
        write_truth(model, optimizer, root / name)
        accelerator.save_state(str(root / name / "ckpt"), safe_serialization=is_safe)


def main(listed: Path) -> None:
    """All runs, one after another in one process group."""
    root = Path(json.loads(listed.read_text())[0]["out"])
    torch.set_num_threads(1)
    model = train_with_trainer(root / "trainer", is_tied=False)
    save_shards(model, root / "trainer", root / "trainer_shards")
    train_with_trainer(root / "trainer_tied", is_tied=True)
    train_with_accelerate(root)
    dist.barrier()


if __name__ == "__main__":
    run_and_leave(lambda: main(Path(sys.argv[1])))
