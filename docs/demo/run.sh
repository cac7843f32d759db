#!/usr/bin/env bash
# Proves that a DataParallel script trains the same in two processes, moves it, and trains it there.
# Then trains a tiny Llama under DeepSpeed ZeRO-3, converts the checkpoint to a Hugging Face folder,
# and compares the logits of the two. `make demo` calls it; needs no GPU and no network.
set -euo pipefail

here="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
work="$(mktemp -d "${TMPDIR:-/tmp}/shardport-demo.XXXXXX")"
trap 'rm -rf "$work"' EXIT
cd "$work"
cp "$here/train_zero3.py" "$here/check_logits.py" .
cp "$here/../../fixtures/scripts/top_level_script/in.py" train.py

export DS_ACCELERATOR=cpu OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false
export PYTHONWARNINGS=ignore::FutureWarning TORCH_CPP_LOG_LEVEL=ERROR

run() {
  printf '\n$ %s\n' "$*"
  "$@"
}

echo "Working in $work"
run migrate verify train.py --to ddp --bn keep
run migrate rewrite train.py --to ddp --bn keep
run torchrun --standalone --nproc-per-node 2 train.py

run torchrun --standalone --nproc-per-node 2 train_zero3.py RUN CONFIG logits.safetensors
run ls RUN RUN/global_step5
run ckpt inspect RUN
run ckpt convert RUN --to hf --hf-config CONFIG -o HF
run ls HF
run python check_logits.py HF logits.safetensors
