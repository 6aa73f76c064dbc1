#!/bin/sh
# Trains a tiny model on pairs of a right and a wrong answer (DPO), on two processes. One minute on two cores.
#
#   sh examples/preferences/dpo.sh [FOLDER]
set -e
out=${1:-runs/preferences}
python examples/finetune/make_inputs.py "$out"
megacore import-hf "$out/model" "$out/start" --seq-length 128
megacore eval "$out/start" --reference "$out/pairs.jsonl" --nproc 2
megacore train "$out/start/config.toml" --nproc 2 --parallel.tp=2 \
    --data.source="$out/pairs.jsonl" --data.split=75,25 --data.packing=best_fit \
    --preference.loss=sigmoid --optimizer.lr=1e-3 --train.steps=40 \
    --train.microbatch_size=2 --train.global_batch_size=4 --train.eval_interval=20 \
    --run.dir="$out/tuned"
megacore export-hf "$out/tuned" "$out/preferred"
