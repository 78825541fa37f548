#!/usr/bin/env bash
# bash benchmarks/gpu_report.sh [out=outputs/gpu_report] [time_limit_s=1800]     measures this machine's GPU
# bash benchmarks/gpu_report.sh dry_run=true [out=DIR]     every line on a CPU with tiny settings; the figures are meaningless
#
# Runs the commands below in order of importance, each with its own time limit and log, and collects what they print in
# DIR/report.md; JSON files lie beside it. Each line is a command that can be run alone; if one fails, the others still run.
# Installs nothing: uses $PYTHON, else .venv, else python3. pytest and Nsight Compute's ncu are used if installed.
# Exit codes: 0 every command completed, 1 one failed or was left out for lack of time, 2 wrong usage.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

refuse() {
    echo "$1" >&2
    exit 2
}

out=outputs/gpu_report time_limit_s=1800 dry_run=false
for word in "$@"; do
    case $word in
    out=?* | time_limit_s=[1-9]* | dry_run=true | dry_run=false) declare "$word" ;;
    *) refuse "$word: expected out=DIR, time_limit_s=SECONDS or dry_run=true" ;;
    esac
done
[ -x .venv/bin/python ] && PYTHON=${PYTHON:-.venv/bin/python}
PYTHON=${PYTHON:-python3}
[ ! -e "$out" ] || refuse "$out exists: name another folder with out=DIR"
[ "$dry_run" = true ] || "$PYTHON" -c 'import sys, torch; sys.exit(not torch.cuda.is_available())' ||
    refuse "this machine has no usable CUDA device; dry_run=true tests the report on the CPU"
mkdir -p "$out"
report=$out/report.md failed=0

# measure NAME LIMIT_S COMMAND...: run COMMAND for at most LIMIT_S seconds, and add the end of its output to the report.
measure() {
    local name=$1 limit_s=$2 left_s=$((time_limit_s - SECONDS)) started=$SECONDS code=0 outcome
    shift 2
    printf '## %s\n\n    %s\n\n' "$name" "$*" >>"$report"
    if ((left_s < limit_s / 3)); then
        outcome="left out: $left_s of $time_limit_s s are left" failed=1
    else
        timeout --kill-after=10 "$((left_s < limit_s ? left_s : limit_s))" "$@" >"$out/$name.log" 2>&1 || code=$?
        case $code in
        0) outcome="done in $((SECONDS - started)) s" ;;
        124 | 137) outcome="killed after $((SECONDS - started)) s" failed=1 ;;
        *) outcome="failed with exit code $code" failed=1 ;;
        esac
        printf '```\n%s\n```\n\n' "$(tail -n 60 "$out/$name.log")" >>"$report"
    fi
    printf '%s\n\n' "$outcome" >>"$report"
    printf '[%5d s] %s: %s\n' "$SECONDS" "$name" "$outcome"
}

cl_train=("$PYTHON" -m cl_train)
if [ "$dry_run" = true ]; then
    device=cpu size=32 batch=4 half=auto others=bf16 compile=false cores=1 per_class=4
    resnet50=tests.networks:small small=tests.networks:small zoo=squeezenet1_1
    steps=(max_steps=14 log_every=2 warmup_steps=4) seconds=1 compiled=() pytest=(--collect-only)
else
    device=cuda size=224 batch=256 half=fp16 others="bf16 tf32 fp16_o2" compile=true cores=$(nproc) per_class=3000
    resnet50=resnet50 small=resnet18,mobilenet_v2,squeezenet1_1 zoo=tutorial
    steps=(max_steps=300 log_every=10 warmup_steps=30) seconds=20
    compiled=(compile=false,true cuda_graph=false,true) pytest=()
fi
step=("device=$device" "data.image_size=$size" "time_limit_s=$seconds")
resnet50_step=("model=$resnet50" "batch_size=$batch" "${step[@]}")
run=("model=$resnet50" "precision=$half" "batch_size=$batch" "device=$device" "data.image_size=$size" "data.workers=$cores"
    channels_last=true "compile=$compile" cuda_graph=auto epochs=50 evaluate_every=-1 checkpoint.every_epochs=0 "${steps[@]}")

# Channels_last against contiguous: eager, compiled, graphed; the target is 1.45 eager, and 1.8 for the best path.
measure resnet50 400 "${cl_train[@]}" benchmark "${resnet50_step[@]}" "precision=$half" "${compiled[@]}" "out=$out/resnet50.json"
measure tests 300 "$PYTHON" -m pytest -q -m gpu tests/test_gpu.py -p no:cacheprovider "${pytest[@]}"
# The whole trainer: one fixed batch, then JPEGs of ImageNet's size on all cores. The second should reach 0.6 of the first.
measure fixed_batch 150 "$PYTHON" train.py "${run[@]}" data=synthetic "hydra.run.dir=$out/fixed_batch" profile=true
measure images 200 "$PYTHON" -c "
from pathlib import Path
from cl_train.data.sample import SampleSpec, ensure_sample
ensure_sample(Path('$out/images'), SampleSpec(train_per_class=$per_class, val_per_class=1))"
measure jpegs 300 "$PYTHON" train.py "${run[@]}" data=folder "data.root=$out/images" "hydra.run.dir=$out/jpegs" profile=true
measure small 300 "${cl_train[@]}" benchmark "model=$small" batch_size=32 "${step[@]}" "precision=$half" "${compiled[@]}" "out=$out/small.json"
measure zoo 600 "${cl_train[@]}" zoo "model=$zoo" batch_size=$((batch / 2)) "${step[@]}" "precision=$half" "out=$out/zoo"
for precision in $others; do
    measure "$precision" 200 "${cl_train[@]}" benchmark "${resnet50_step[@]}" "precision=$precision" "out=$out/$precision.json"
done
# Bytes of device memory that each kernel reads and writes; --cache-control none: by default ncu empties the caches.
if command -v ncu >/dev/null; then
    measure ncu 200 ncu --clock-control none --cache-control none --csv --log-file "$out/ncu.csv" --launch-skip 4000 --launch-count 600 \
        --metrics dram__bytes_read.sum,dram__bytes_write.sum "${cl_train[@]}" benchmark "${resnet50_step[@]}" "precision=$half" layouts=channels_last,contiguous
fi
echo "$report"
exit $failed
