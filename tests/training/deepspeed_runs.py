"""Training and saving with DeepSpeed; the only file here that needs it."""

import logging
from pathlib import Path
from typing import Any

import deepspeed
import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state
from torch import Tensor, nn

from training.cases import Case
from training.live import group_meta, jsonable, mean_over_ranks, world_size
from training.model import GLOBAL_BATCH, batch, build, decay_groups
from training.torch_runs import Session
from training.wrap import make_optimizer, make_scheduler

STATE_KEYS = {"adamw": ("exp_avg", "exp_avg_sq"), "sgd": ("momentum_buffer",)}


def configuration(case: Case) -> dict[str, Any]:
    """DeepSpeed's configuration for a case."""
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": GLOBAL_BATCH // world_size(),
        "gradient_accumulation_steps": 1,
        "gradient_clipping": 0.0,  # 1.0 when left out, in DeepSpeed 0.19
        "steps_per_print": 10000,
        "zero_allow_untested_optimizer": True,
        **case.config,
    }
    config["zero_optimization"] = {"stage": case.stage, **config.get("zero_optimization", {})}
    if case.dtype == "bf16":
        config["bf16"] = {"enabled": True}
    if case.dtype == "fp16":
        get_accelerator().is_fp16_supported = lambda: True  # most CPUs deny it, yet torch can do it
        config["fp16"] = {"enabled": True, "initial_scale_power": 8}
    return config


def open_deepspeed(case: Case) -> Session:
    """The case's net in a DeepSpeed engine."""
    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    net = build(case.options)
    groups = decay_groups(net)
    base = make_optimizer(net, groups, case.optimizer)
    scheduler = make_scheduler(base)
    config = configuration(case)
    engine, zero, _, _ = deepspeed.initialize(
        model=net, optimizer=base, lr_scheduler=scheduler, config=config, dist_init_required=False
    )

    def train_step(step: int) -> float:
        loss = engine(*batch(step, engine.global_rank, world_size()))
        engine.backward(loss)
        engine.step()
        return mean_over_ranks(loss)

    def save(folder: Path, client: dict[str, Any]) -> None:
        engine.save_checkpoint(str(folder), client_state=client)

    def meta() -> dict[str, Any]:
        return {
            "deepspeed": deepspeed.__version__,
            "ds_config": jsonable(config),
            "stage": case.stage,
            "optimizer": type(base).__name__,
            "zero_optimizer": type(zero).__name__,
            "skipped_steps": engine.skipped_steps,
        }

    return Session(
        module=engine.module,
        scheduler=scheduler,
        train_step=train_step,
        gather=lambda: gather_whole(case, engine.module, zero, base),
        param_groups=lambda: group_meta(base, [names for names, _ in groups]),
        save=save,
        meta=meta,
    )


def gather_whole(case: Case, module: nn.Module, zero: Any, base: Any) -> dict[str, Tensor]:
    """Asks DeepSpeed for whole tensors, parameter by parameter."""
    if hasattr(zero, "_lazy_init_hp_params_optimizer_state"):
        zero._hp_optimizer_states_linked = False  # stages 1 and 2 link the first group only: again
        zero._lazy_init_hp_params_optimizer_state()
    step = max((float(s["step"]) for s in base.state.values() if "step" in s), default=None)
    tensors: dict[str, Tensor] = {}
    for name, parameter in module.named_parameters():
        low = _low_precision(parameter, case.stage)
        if case.dtype != "fp32":
            tensors[f"lp/{name}"] = low
        if not parameter.requires_grad:
            tensors[name] = low.float()
            continue
        tensors[name] = _whole(safe_get_full_fp32_param(parameter), low, name)
        for key in STATE_KEYS[case.optimizer]:
            value = safe_get_full_optimizer_state(parameter, key)
            truth_key = f"{key.removesuffix('_buffer')}/{name}"
            tensors[truth_key] = _whole(value, low, truth_key)
        if step is not None:
            tensors[f"step/{name}"] = torch.tensor(step)
    return tensors


def gather_weights(module: nn.Module, stage: int) -> dict[str, Tensor]:
    """Whole weights as the optimizer has them, those of frozen parameters as the module does."""
    tensors: dict[str, Tensor] = {}
    for name, parameter in module.named_parameters():
        low = _low_precision(parameter, stage)
        tensors[f"lp/{name}"] = low
        master = safe_get_full_fp32_param(parameter) if parameter.requires_grad else low.float()
        tensors[name] = _whole(master, low, name)
    return tensors


def _low_precision(parameter: nn.Parameter, stage: int) -> Tensor:
    if stage < 3:
        return parameter.detach().clone()
    with deepspeed.zero.GatheredParameters([parameter]):
        return parameter.detach().clone()


def _whole(value: Tensor | None, like: Tensor, key: str) -> Tensor:
    if value is None:
        raise RuntimeError(f"DeepSpeed gives no {key}")
    return value.detach().float().clone().reshape(like.shape)
