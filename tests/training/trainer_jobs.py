"""Trains with transformers' Trainer and with accelerate, converts their folders, and resumes.

torchrun --standalone --nproc-per-node W tests/training/trainer_jobs.py JOBS.json

A job is `{"kind": "trainer" | "accelerate", "mode": "zero2" | "zero3" | "fsdp" | "ddp", "out":
FOLDER}` and to resume, `"source"`, the folder that another job saved, which is converted for this
one first.
`out` gets losses.json, the losses of the steps that were taken; a job that begins anew also saves,
to `out/checkpoint-3` or `out/state`. The net has dropout, and a job that resumes begins with other
weights and random numbers, so that all has to come from the folder.
"""

import gc
import json
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

os.environ |= {"DS_ACCELERATOR": "cpu", "ACCELERATE_TORCH_DEVICE": "cpu", "HF_HUB_OFFLINE": "1"}
sys.path[:0] = [str(Path(__file__).resolve().parents[up]) for up in (1, 2)]

import accelerate.state as accelerate_state
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, Dataset

import ckpt
from training.leaving import run_and_leave
from training.live import mean_over_ranks, rank, world_size

LINEAR = torch.nn.functional.linear
"""torch's own: DeepSpeed's stage 3 puts another in its place, for the whole process."""

SEED, OTHER_SEED, STEPS, MORE_STEPS = 1234, 4321, 3, 3
BATCH, LENGTH, VOCAB = 4, 8, 31
CLIPPING = 1.0


class Tokens(Dataset[dict[str, torch.Tensor]]):
    """Rows that a seed makes; enough for all steps of one epoch."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(7)
        count = BATCH * world_size() * (STEPS + MORE_STEPS)
        self.rows = torch.randint(0, VOCAB, (count, LENGTH), generator=generator)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.rows[index], "labels": self.rows[index]}


def build(seed: int) -> Any:
    """A GPT-2 of two blocks, with dropout and tied embeddings."""
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(seed)
    special = {"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0}
    config = GPT2Config(
        vocab_size=VOCAB, n_positions=16, n_embd=14, n_layer=2, n_head=2, **special
    )  # fmt: skip
    return GPT2LMHeadModel(config)


def deepspeed_config(mode: str, micro_batch: int | str) -> dict[str, Any]:
    """The configuration, with sub-groups small enough that there are several."""
    return {
        "train_micro_batch_size_per_gpu": micro_batch,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": CLIPPING,
        "zero_allow_untested_optimizer": True,
        "zero_optimization": {"stage": int(mode[-1]), "sub_group_size": 2000},
    }


def strategy(mode: str) -> dict[str, Any]:
    """What TrainingArguments want of it."""
    if mode == "ddp":
        return {"use_cpu": True}
    if mode != "fsdp":
        return {"deepspeed": deepspeed_config(mode, "auto")}
    wrapped = {"transformer_layer_cls_to_wrap": ["GPT2Block"]}
    options = {**wrapped, "version": 2, "state_dict_type": "SHARDED_STATE_DICT"}
    return {"fsdp": "full_shard auto_wrap", "fsdp_config": options}


def converted(job: Mapping[str, Any], out: Path) -> str:
    """Converted for this job, the trainer's own files with it."""
    source, output = Path(job["source"]), out / "converted"
    if rank() == 0:
        config = deepspeed_config(job["mode"], "auto")
        ckpt.convert(source, job["mode"], output, world_size=world_size(), ds_config=config)
    dist.barrier()
    return str(output)


def use_cpus(mode: str) -> None:
    """As accelerators, for accelerate knows FSDP and DeepSpeed on these only."""
    kinds = accelerate_state.DistributedType
    kind = kinds.MULTI_CPU if mode == "ddp" else kinds.MULTI_GPU
    accelerate_state.PartialState._prepare_backend = lambda *_args, **_more: ("gloo", kind)


def forget_the_last_job() -> None:
    """Both libraries keep the state of a process in globals."""
    from transformers.integrations.deepspeed import unset_hf_deepspeed_config

    accelerate_state.AcceleratorState._reset_state(True)
    unset_hf_deepspeed_config()
    torch.nn.functional.linear = LINEAR
    for name in ("ACCELERATE_USE_DEEPSPEED", "ACCELERATE_USE_FSDP", "FSDP_VERSION"):
        os.environ.pop(name, None)
    gc.collect()


def run_trainer(job: Mapping[str, Any], out: Path) -> list[float]:
    """Six steps of Trainer with a save after three, or the last three from a folder."""
    from transformers import Trainer, TrainingArguments

    resumes = "source" in job
    arguments = TrainingArguments(
        output_dir=str(out),
        per_device_train_batch_size=BATCH,
        max_steps=STEPS + MORE_STEPS,
        learning_rate=1e-2,
        weight_decay=0.1,
        max_grad_norm=CLIPPING,
        warmup_steps=1,
        logging_steps=1,
        save_steps=STEPS,
        seed=SEED,
        train_sampling_strategy="sequential",
        report_to=[],
        disable_tqdm=True,
        **strategy(job["mode"]),
    )
    model = build(OTHER_SEED if resumes else SEED)
    trainer = Trainer(model=model, args=arguments, train_dataset=Tokens())
    torch.manual_seed(rank() + (OTHER_SEED if resumes else SEED))
    trainer.train(resume_from_checkpoint=converted(job, out) if resumes else None)
    first = STEPS if resumes else 0
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry][first:]


def run_accelerate(job: Mapping[str, Any], out: Path) -> list[float]:
    """Six steps under an Accelerator with save_state after three, or load_state and the rest."""
    from accelerate import Accelerator, DeepSpeedPlugin

    resumes = "source" in job
    plugin = DeepSpeedPlugin(hf_ds_config=deepspeed_config(job["mode"], BATCH))
    accelerator = Accelerator(deepspeed_plugin=plugin)
    model = build(OTHER_SEED if resumes else SEED)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=4, gamma=0.5)
    model, optimizer, scheduler = accelerator.prepare(model, optimizer, scheduler)
    torch.manual_seed(rank() + (OTHER_SEED if resumes else SEED))
    rows = list(DataLoader(Tokens(), batch_size=BATCH * world_size()))  # takes a random number
    if resumes:
        accelerator.load_state(converted(job, out))
    losses = []
    for step in range(STEPS if resumes else 0, STEPS + MORE_STEPS):
        if step == STEPS and not resumes:
            accelerator.save_state(str(out / "state"))
        mine = rows[step]["input_ids"][rank() * BATCH : (rank() + 1) * BATCH]
        loss = model(input_ids=mine, labels=mine).loss
        accelerator.backward(loss)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        losses.append(mean_over_ranks(loss))
    return losses


def main(listed: Path) -> None:
    """All jobs, one after another in one process group."""
    import deepspeed

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    deepspeed.init_distributed("gloo", verbose=False)
    for job in json.loads(listed.read_text()):
        print(job, flush=True)
        out = Path(job["out"])
        out.mkdir(parents=True, exist_ok=True)
        dist.barrier()
        use_cpus(job["mode"])
        run = run_trainer if job["kind"] == "trainer" else run_accelerate
        losses = run(job, out)
        if rank() == 0:
            (out / "losses.json").write_text(json.dumps(losses))
        dist.barrier()
        forget_the_last_job()


if __name__ == "__main__":
    run_and_leave(lambda: main(Path(sys.argv[1])))
