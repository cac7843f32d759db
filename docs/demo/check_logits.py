"""Loads a converted folder with transformers and compares its logits with the trained model's.

Prints the largest difference; exits 1 if it is above 1e-6.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # everything is local

import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM
from transformers.utils import logging

TOLERANCE = 1e-6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, help="the converted folder")
    parser.add_argument("logits", type=Path, help="the file that train_zero3.py wrote")
    arguments = parser.parse_args()

    torch.set_num_threads(1)  # as in training: sums in one order
    logging.disable_progress_bar()
    expected = load_file(arguments.logits)
    model = AutoModelForCausalLM.from_pretrained(arguments.folder, dtype=torch.float32).eval()
    with torch.no_grad():
        logits = model(input_ids=expected["input_ids"]).logits
    difference = (logits - expected["logits"]).abs().max().item()

    print(f"compared {logits.numel():,} logits")
    print(f"largest difference from the trained model: {difference:g}")
    if not difference <= TOLERANCE:
        sys.exit(f"FAILED: the difference is above {TOLERANCE:g}")
    print("OK: the converted model is the trained model")


if __name__ == "__main__":
    main()
