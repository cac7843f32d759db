"""The forms in which an optimizer's state is saved, read into one.

- `torch.optim.Optimizer.state_dict()`: states by number, `param_groups[i]["params"]` of numbers,
  `param_names` beside them when the optimizer was built from named parameters.
- FSDP1 and `get_optimizer_state_dict`: the same, by FQN.
- `flatten_optimizer_state_dict=True`: one flat dict of `state.<fqn>.<name>` and
  `param_groups.<fqn>.<hyper-parameter>`.

Source: torch 2.13.0 torch/optim/optimizer.py, torch/distributed/checkpoint/state_dict.py
(`_flatten_optim_state_dict`), torch/distributed/fsdp/_optim_utils.py.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ckpt.errors import CorruptCheckpoint
from ckpt.model import Plain, Scalar, StoredTensor
from ckpt.param_order import Slot

__all__ = ["FLAT_GROUPS", "FLAT_STATE", "OptimizerDict", "is_optimizer", "read_optimizer"]

Member = int | str
States = Mapping[Member, Mapping[str, StoredTensor | Scalar]]
ELEMENTWISE = ("exp_avg", "exp_avg_sq", "momentum_buffer")  # of a parameter's shape, always
FACTORED = ("_row", "_col")  # Adafactor's states: rows and columns of the second moment
FLAT_STATE, FLAT_GROUPS = "state.", "param_groups."


@dataclass(frozen=True, slots=True)
class OptimizerDict:
    """An optimizer's state, by number or by FQN as it was saved.

    Attributes:
        members: the members of each param group, in order.
        options: the hyper-parameters of each param group.
        names: FQN by number where the optimizer kept `param_names`.
    """

    states: States
    members: tuple[tuple[Member, ...], ...]
    options: tuple[Mapping[str, Plain], ...]
    names: Mapping[int, str]

    @property
    def is_numbered(self) -> bool:
        """True when the members are numbers."""
        return any(isinstance(m, int) for group in self.members for m in group)

    def spelled_names(self) -> dict[Member, str] | None:
        """The name of every member as saved, or None when some have only a number."""
        spelled = {
            m: m if isinstance(m, str) else self.names.get(m) for g in self.members for m in g
        }
        found = {member: name for member, name in spelled.items() if name is not None}
        return found if len(found) == len(spelled) else None

    def slots(self) -> list[list[Slot]]:
        """Numbers with the shapes their states show, by group."""
        return [
            [Slot(m, self._shape(m)) for m in group if isinstance(m, int)] for group in self.members
        ]

    def _shape(self, member: Member) -> tuple[int, ...] | None:
        """The parameter's shape: that of the elementwise states, or None when it is not clear."""
        state = self.states.get(member, {})
        shapes = {
            value.shape
            for name, value in state.items()
            if isinstance(value, StoredTensor) and (value.shape or name in ELEMENTWISE)
        }
        factored = any(name.endswith(FACTORED) for name in state)
        return shapes.pop() if len(shapes) == 1 and not factored else None


def is_optimizer(tree: Plain) -> bool:
    """True for a dict that has the shape of an optimizer's state, in any of the forms."""
    if not isinstance(tree, Mapping):
        return False
    groups = tree.get("param_groups")
    if isinstance(tree.get("state"), Mapping) and groups is not None:
        return True
    if "state" not in tree and isinstance(groups, list) and groups:  # DCP saves no empty dict
        return all(isinstance(group, Mapping) and "params" in group for group in groups)
    keys = [key for key in tree if isinstance(key, str)]
    return (
        bool(keys)
        and any(key.startswith(FLAT_GROUPS) for key in keys)
        and all(key.startswith((FLAT_STATE, FLAT_GROUPS)) for key in keys)
    )


def read_optimizer(tree: Mapping[str, Plain], where: str) -> OptimizerDict:
    """The optimizer's state in one form.

    Raises:
        CorruptCheckpoint: param groups that are no list of dicts with `params`.
    """
    if "param_groups" not in tree:
        return _read_flattened(tree)
    groups = tree["param_groups"]
    if isinstance(groups, Mapping):
        groups = list(groups.values())
    if not isinstance(groups, Sequence) or not all(
        isinstance(group, Mapping) and isinstance(group.get("params"), Sequence) for group in groups
    ):
        raise CorruptCheckpoint(f"{where}: param_groups is not a list of dicts with `params`")
    members = tuple(tuple(group["params"]) for group in groups)
    numbered = any(isinstance(m, int) for group in members for m in group)
    states = {
        _number(key) if numbered else key: value for key, value in tree.get("state", {}).items()
    }
    names = {
        member: str(name)
        for group in groups
        for member, name in zip(group["params"], group.get("param_names") or (), strict=False)
    }
    options = tuple(
        {k: v for k, v in group.items() if k not in ("params", "param_names")} for group in groups
    )
    return OptimizerDict(states, members, options, names)


def _number(key: Plain) -> Member:
    """DCP turns the numbers of a state dict into strings."""
    return int(key) if isinstance(key, str) and key.isdigit() else key


def _read_flattened(tree: Mapping[str, Plain]) -> OptimizerDict:
    states: dict[Member, dict[str, StoredTensor | Scalar]] = {}
    options: dict[str, dict[str, Plain]] = {}
    for key, value in tree.items():
        kind = FLAT_STATE if key.startswith(FLAT_STATE) else FLAT_GROUPS
        fqn, _, name = key.removeprefix(kind).rpartition(".")
        if kind == FLAT_STATE:
            states.setdefault(fqn, {})[name] = value
        else:
            options.setdefault(fqn, {})[name] = value
    groups: list[tuple[dict[str, Plain], list[Member]]] = []
    for fqn, hyper in options.items():
        group = next((g for g in groups if g[0] == hyper), None)
        if group is None:
            groups.append((hyper, [fqn]))
        else:
            group[1].append(fqn)
    return OptimizerDict(
        states, tuple(tuple(g[1]) for g in groups), tuple(g[0] for g in groups), {}
    )
