#!/bin/sh
# Trains adapters of a tiny model on conversations, and writes log-probs, the adapter and merged weights.
# One minute on two cores, most of it to start the commands.
#
#   sh examples/finetune/lora.sh [FOLDER]
set -e
out=${1:-runs/finetune}
python examples/finetune/make_inputs.py "$out"
[ -d "$out/start" ] || megacore import-hf "$out/model" "$out/start" --seq-length 128
megacore train "$out/start/config.toml" --nproc 2 \
    --data.source="$out/conversations.jsonl" --data.field=messages \
    --data.packing=best_fit --data.document_mask=true --data.split=1,0 \
    --lora.rank=4 --lora.alpha=8 --optimizer.weight_decay=0.0 \
    --optimizer.lr=1e-2 --train.steps=20 --train.microbatch_size=4 --train.global_batch_size=8 \
    --train.eval_interval=0 --run.dir="$out/adapted"
megacore eval "$out/adapted" --data "$out/conversations.jsonl" --logprobs "$out/logprobs.jsonl" --nproc 2
megacore export-hf "$out/adapted" "$out/adapter" --adapter --base "$out/model"
megacore export-hf "$out/adapted" "$out/merged" --merge
