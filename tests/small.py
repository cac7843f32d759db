"""The smallest model with matrices and vectors, and an optimizer that has taken one step."""

from __future__ import annotations

import torch


def small_model() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Linear(4, 2))


def stepped(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    return optimizer
