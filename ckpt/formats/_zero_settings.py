"""What of a DeepSpeed job decides how its checkpoint is laid out, out of its configuration.

The configuration is that of `--ds-config`, of the checkpoint given with `--like`, or of the
source, in this order. An option of it that makes a layout not written here is refused by name.

Source: deepspeed 0.19.8 runtime/zero/config.py (`DeepSpeedZeroConfig`), runtime/engine.py
(`get_data_types`, `_do_optimizer_sanity_check`, `_configure_basic_optimizer`),
runtime/precision_config.py, runtime/fp16/loss_scaler.py.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from ckpt.dtypes import DType
from ckpt.errors import Unsupported
from ckpt.format import WriteOptions
from ckpt.model import Checkpoint, Opaque, Plain
from ckpt.note import Note, NoteKind
from ckpt.optimizers import OptimizerClass, class_of

__all__ = ["ZERO", "Settings", "settings_of"]

ZERO = "zero_optimization"
LOSS_SCALER = "deepspeed.runtime.fp16.loss_scaler.LossScaler"
DYNAMIC_LOSS_SCALER = "deepspeed.runtime.fp16.loss_scaler.DynamicLossScaler"
DEFAULT_SUB_GROUP_SIZE = 1_000_000_000
DEFAULT_GRADIENT_CLIPPING = 1.0  # deepspeed 0.19.8 runtime/constants.py
AUTO = "auto"  # what transformers' Trainer fills in
SECTIONS = {
    DType.bfloat16: ("bf16", "bfloat16"),
    DType.float16: ("fp16",),
    DType.float32: (),
}
"""The section of the configuration that switches a precision on."""

REFUSED = (
    (f"{ZERO}.mics_shard_size", lambda v: v and v > 0),
    (f"{ZERO}.offload_optimizer.device", lambda v: v == "nvme"),
    (f"{ZERO}.offload_param.device", lambda v: v == "nvme"),
    (f"{ZERO}.offload_optimizer.super_offload", bool),
    (f"{ZERO}.offload_optimizer.ratio", lambda v: v is not None and v < 1),
    (f"{ZERO}.zenflow", bool),
    (f"{ZERO}.zero_hpz_partition_size", lambda v: v is not None and v > 1),
    (f"{ZERO}.zero_quantized_weights", bool),
    (f"{ZERO}.zero_quantized_nontrainable_weights", bool),
    (f"{ZERO}.legacy_stage1", bool),
    ("bf16.bf16_master_weights_and_grads", bool),
    ("bf16.bf16_optimizer_states", bool),
    ("fp16.fp16_master_weights_and_grads", bool),
    ("tensor_parallel.autotp_size", lambda v: v is not None and v > 1),
    ("checkpoint.load_universal", bool),
)
"""Options under which DeepSpeed lays a checkpoint out in another way, or does not load this one."""

FP32_NAMES = frozenset({"fp32", "float32", "float", "torch.float32", "torch.float"})


@dataclass(frozen=True, slots=True)
class Settings:
    """How the checkpoint of one job is laid out.

    Attributes:
        precision: dtype that the module computes in.
        sub_group_size: elements of a rank's share after which stage 3 begins a new sub-group.
        is_round_robin: stages 1 and 2 deal parameters out to the ranks in turn.
        is_aligned: stages 1 and 2 let each parameter begin at a multiple of 16 bytes.
        is_bf16_optimizer: stage 1 with BF16_Optimizer, whose files differ.
        config: the configuration that goes into the files.
        clip_grad: None where no configuration tells; the job that loads then keeps its own.
        optimizer: the class to write for; None for the source's own.
        loss_scaler: the instance that goes into the files.
    """

    stage: int
    world_size: int
    precision: DType
    sub_group_size: int
    is_round_robin: bool
    is_aligned: bool
    is_bf16_optimizer: bool
    config: Mapping[str, Plain]
    clip_grad: float | None
    optimizer: OptimizerClass | None
    loss_scaler: Opaque

    @property
    def is_bf16(self) -> bool:
        """Whether DeepSpeed's bf16 is on, which shows in the files' names."""
        return self.precision is DType.bfloat16


def settings_of(
    checkpoint: Checkpoint, options: WriteOptions, stage: int
) -> tuple[Settings, list[Note]]:
    """The settings for a checkpoint's way into ZeRO files, and what was assumed.

    Raises:
        Unsupported: an option that makes another layout, or contradicts the target.
    """
    config, where, notes = _config(checkpoint, options, stage)
    world_size, said = _world_size(checkpoint, options)
    precision, assumed = _precision(checkpoint, options, config, where)
    config = _with_precision(config, precision)
    scaler, made = _loss_scaler(checkpoint, config, precision)
    zero = config[ZERO]
    settings = Settings(
        stage=stage,
        world_size=world_size,
        precision=precision,
        sub_group_size=int(_number(config, f"{ZERO}.sub_group_size", DEFAULT_SUB_GROUP_SIZE)),
        is_round_robin=zero.get("round_robin_gradients") is True,
        is_aligned=zero.get("parameter_alignment") is True,
        is_bf16_optimizer=stage == 1 and _uses_bf16_optimizer(config, precision),
        config=config,
        clip_grad=float(_number(config, "gradient_clipping", DEFAULT_GRADIENT_CLIPPING))
        if where
        else None,
        optimizer=_optimizer(config, options, where),
        loss_scaler=scaler,
    )
    return settings, [*said, *notes, *assumed, *made]


def _config(
    checkpoint: Checkpoint, options: WriteOptions, stage: int
) -> tuple[dict[str, Any], str, list[Note]]:
    """The configuration, where it is from (empty: nowhere), and notes."""
    found: tuple[str, Plain] = ("", {})
    for where, candidate in (
        ("--ds-config", options.ds_config),
        ("--like", options.like and options.like.objects.get("ds_config")),
        ("the source's ds_config", checkpoint.objects.get("ds_config")),
    ):
        if isinstance(candidate, Mapping):
            found = (where, candidate)
            break
    where, given = found
    config = dict(given)
    zero = config.get(ZERO)
    zero = dict(zero) if isinstance(zero, Mapping) else {}
    _refuse(config, where, stage)
    was = zero.get("stage", 0)
    if where == "--ds-config" and was != stage:
        raise Unsupported(
            f"--ds-config: {ZERO}.stage is {was}, and the target is zero{stage}; they have to agree"
        )
    config[ZERO] = {**zero, "stage": stage}
    return config, where, list(_config_notes(where, was, zero, stage))


def _config_notes(where: str, was: Plain, zero: Mapping[str, Plain], stage: int) -> Iterator[Note]:
    if not where:
        detail = (
            "not in the source: DeepSpeed's defaults decide the layout; give the job's with "
            "--ds-config"
        )
        yield Note(NoteKind.SYNTHESISED, ("ds_config",), detail, of_job=True)
    elif was != stage:
        detail = f"{where} is of stage {was}; its other settings are kept"
        yield Note(NoteKind.SYNTHESISED, (f"ds_config with stage {stage}",), detail, of_job=True)
    if zero.get("elastic_checkpoint") is True:
        detail = "written as DeepSpeed's default, rigid checkpoint, which such a job loads, too"
        yield Note(NoteKind.CAST, (f"{ZERO}.elastic_checkpoint",), detail, of_job=True)


def _refuse(config: Mapping[str, Plain], where: str, stage: int) -> None:
    refused = [name for name, is_other in REFUSED if is_other(_set(config, name))]
    if stage == 3 and _set(config, f"{ZERO}.elastic_checkpoint"):
        refused.append(f"{ZERO}.elastic_checkpoint")
    kind = str(_set(config, "optimizer.type") or "").lower()
    if kind.startswith(("muon", "onebit", "zeroone", "mu")):
        refused.append(f"optimizer.type {kind}")
    if refused:
        raise Unsupported(
            f"{where}: {', '.join(refused)}: DeepSpeed then lays its checkpoint out, or loads it, "
            "in another way than is written here; give --ds-config FILE, the configuration of the "
            "job that will load it, without that, or convert to another format"
        )


def _value(config: Mapping[str, Plain], path: str) -> Plain:
    """The value at a dotted path, or None."""
    value: Plain = config
    for key in path.split("."):
        value = value.get(key) if isinstance(value, Mapping) else None
    return value


def _set(config: Mapping[str, Plain], path: str) -> Plain:
    """As `_value`; None also for "auto", which is DeepSpeed's default here."""
    value = _value(config, path)
    return None if value == AUTO else value


def _number(config: Mapping[str, Plain], path: str, default: float) -> float:
    value = _set(config, path)
    return value if isinstance(value, int | float) else default


def _world_size(checkpoint: Checkpoint, options: WriteOptions) -> tuple[int, list[Note]]:
    if options.world_size is not None:
        return options.world_size, []
    for where, found in (("--like", options.like), ("the source", checkpoint)):
        if found is not None and found.origin.world_size:
            count = found.origin.world_size
            detail = f"that of {where}; --world-size N for another"
            return count, [Note(NoteKind.SYNTHESISED, (f"world size {count}",), detail)]
    detail = "the source does not tell; --world-size N for another"
    return 1, [Note(NoteKind.SYNTHESISED, ("world size 1",), detail)]


# --- precision ----------------------------------------------------------------------------------


def _precision(
    checkpoint: Checkpoint, options: WriteOptions, config: Mapping[str, Plain], where: str
) -> tuple[DType, list[Note]]:
    """What the module computes in: as asked, as configured, or as the source did."""
    asked = options.dtype.dtype if options.dtype else None
    configured = _configured_precision(config) if where else None
    if asked and where == "--ds-config" and configured not in (None, asked):
        assert configured is not None
        raise Unsupported(
            f"--dtype {asked.torch_name}: --ds-config says {configured.torch_name}; they have to "
            "agree"
        )
    if asked or configured:
        chosen = asked or configured
        assert chosen is not None
        return chosen, []
    of = options.like or checkpoint
    found = _computed_in(of)
    detail = f"as {'--like' if options.like else 'the source'} computes; --dtype for another"
    return found, [Note(NoteKind.SYNTHESISED, (f"a {found.torch_name} engine",), detail)]


def _configured_precision(config: Mapping[str, Plain]) -> DType | None:
    """None where the configuration leaves it open ("auto")."""
    is_open = False
    for dtype, names in SECTIONS.items():
        for name in names:
            enabled = _value(config, f"{name}.enabled")
            is_open = is_open or enabled == AUTO
            if enabled is True:
                return dtype
    return None if is_open else DType.float32


def _computed_in(checkpoint: Checkpoint) -> DType:
    """The dtype of most elements of the model, when it is one that DeepSpeed computes in."""
    elements: Counter[DType] = Counter()
    for param in checkpoint.params.values():
        dtype = param.lp_dtype or (param.value.dtype if param.value else DType.float32)
        elements[dtype] += param.weight.numel
    most = elements.most_common(1)
    return most[0][0] if most and most[0][0] in SECTIONS else DType.float32


def _with_precision(config: dict[str, Any], precision: DType) -> dict[str, Any]:
    """The configuration with just this precision switched on."""
    if _configured_precision(config) is precision:
        return config
    for dtype, names in SECTIONS.items():
        for name in names:
            if name in config or (dtype is precision and name == names[0]):
                section = config.get(name)
                kept = section if isinstance(section, Mapping) else {}
                config[name] = {**kept, "enabled": dtype is precision and name == names[0]}
    return config


def _uses_bf16_optimizer(config: Mapping[str, Plain], precision: DType) -> bool:
    accumulates = str(_set(config, "data_types.grad_accum_dtype")).lower() in FP32_NAMES
    offloads = _set(config, f"{ZERO}.offload_optimizer.device") == "cpu"
    return precision is DType.bfloat16 and accumulates and not offloads


# --- loss scale and optimizer -------------------------------------------------------------------


def _loss_scaler(
    checkpoint: Checkpoint, config: Mapping[str, Plain], precision: DType
) -> tuple[Opaque, list[Note]]:
    """The source's dynamic loss scaler under fp16; else one as the configuration makes it."""
    found = checkpoint.objects.get("loss_scaler")
    theirs = found if isinstance(found, Opaque) and isinstance(found.state, Mapping) else None
    if precision is not DType.float16:
        note = Note(NoteKind.DROPPED, ("loss_scaler",), "fp16 alone scales its loss", of_job=True)
        return Opaque(LOSS_SCALER, {"cur_scale": 1.0, "dynamic": False}), [note] if theirs else []
    scale = _number(config, "fp16.loss_scale", 0)
    if scale:
        return Opaque(LOSS_SCALER, {"cur_scale": scale, "dynamic": False}), []
    made = _fresh_scaler(config)
    if theirs is not None:
        return Opaque(DYNAMIC_LOSS_SCALER, {**made, **theirs.state}), []
    detail = "not in the source; begins anew, as configured"
    note = Note(NoteKind.SYNTHESISED, (f"loss scale {made['cur_scale']}",), detail, of_job=True)
    return Opaque(DYNAMIC_LOSS_SCALER, made), [note]


def _fresh_scaler(config: Mapping[str, Plain]) -> dict[str, Plain]:
    hysteresis = _number(config, "fp16.hysteresis", 2)
    return {
        "cur_scale": 2 ** _number(config, "fp16.initial_scale_power", 16),
        "dynamic": True,
        "cur_iter": 0,
        "last_overflow_iter": -1,
        "scale_factor": 2.0,
        "scale_window": _number(config, "fp16.loss_scale_window", 1000),
        "min_scale": _number(config, "fp16.min_loss_scale", 1),
        "delayed_shift": hysteresis,
        "cur_hysteresis": hysteresis,
        "consecutive_hysteresis": _set(config, "fp16.consecutive_hysteresis") is True,
        "raise_error_at_min_scale": True,
        "dtype": DType.float16,
    }


def _optimizer(
    config: Mapping[str, Plain], options: WriteOptions, where: str
) -> OptimizerClass | None:
    """The class that `--ds-config` names or `--like` has; None for the source's own."""
    kind = str(_set(config, "optimizer.type") or "").lower()
    if where == "--ds-config" and kind:
        on_cpu = _set(config, f"{ZERO}.offload_optimizer.device") == "cpu"
        return _configured_class(kind, on_cpu, config)
    if options.like is not None and options.like.has_optimizer:
        guess = class_of(options.like)
        return guess.found if guess.is_certain else None
    return None


def _configured_class(
    kind: str, on_cpu: bool, config: Mapping[str, Plain]
) -> OptimizerClass | None:
    by_place = {
        "lion": (OptimizerClass.FUSED_LION, OptimizerClass.CPU_LION),
        "adagrad": (OptimizerClass.ADAGRAD, OptimizerClass.CPU_ADAGRAD),
        "sgd": (OptimizerClass.SGD, OptimizerClass.SGD),
        "adam": (OptimizerClass.FUSED_ADAM, OptimizerClass.CPU_ADAM),
        "adamw": (OptimizerClass.FUSED_ADAM, OptimizerClass.CPU_ADAM),
    }
    if kind not in by_place:
        return None
    if kind.startswith("adam") and _set(config, "optimizer.params.torch_adam") is True:
        coupled = kind == "adam" and _set(config, "optimizer.params.adam_w_mode") is False
        return OptimizerClass.ADAM if coupled else OptimizerClass.ADAMW
    return by_place[kind][on_cpu]
