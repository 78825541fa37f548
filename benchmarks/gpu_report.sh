#!/usr/bin/env bash
# bash benchmarks/gpu_report.sh [out=outputs/gpu_report] [time_limit_s=540]      measures this machine's GPU
# bash benchmarks/gpu_report.sh dry_run=true [out=DIR]     every line on a CPU with tiny settings; the figures are meaningless
#
# Names the packages that are missing, then runs the commands below, the decisive ones first, and adds what they print to
# DIR/report.md; logs and JSON files lie beside it. It ends within time_limit_s: called again with the same `out`, it goes
# on with the commands that had no time. If one fails, the others still run; DIR/NAME.failed keeps it from being repeated.
# Installs nothing: uses $PYTHON, else .venv, else python3, with pytest.
# Exit codes: 0 every command completed, 1 one failed or was left out for lack of time, 2 wrong usage or missing packages.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

refuse() {
    echo "$1" >&2
    exit 2
}

out=outputs/gpu_report time_limit_s=540 dry_run=false
for word in "$@"; do
    case $word in
    out=?* | time_limit_s=[1-9]* | dry_run=true | dry_run=false) declare "$word" ;;
    *) refuse "$word: expected out=DIR, time_limit_s=SECONDS or dry_run=true" ;;
    esac
done
[ -x .venv/bin/python ] && PYTHON=${PYTHON:-.venv/bin/python}
PYTHON=${PYTHON:-python3}
report=$out/report.md failed=0
[ ! -e "$out" ] || [ -f "$report" ] || refuse "$out exists and holds no report: name another folder with out=DIR"
device=cuda
[ "$dry_run" = false ] || device=cpu
versions=$("$PYTHON" -m benchmarks.preflight "$device") || refuse "$versions"
mkdir -p "$out"
[ -f "$report" ] || printf '    %s\n\n' "$versions" >"$report"

# Clock, power, temperature and the reasons for a lower clock (0: none; 4: power; 8, 20, 40, 80: heat and brake).
gpu_state() {
    command -v nvidia-smi >/dev/null || return 0
    nvidia-smi --query-gpu=clocks.sm,power.draw,temperature.gpu,clocks_throttle_reasons.active --format=csv,noheader 2>&1 | head -n 1
}

# tell NAME OUTCOME
tell() {
    printf '[%5d s] %s: %s\n' "$SECONDS" "$1" "$2"
    [[ $2 == done* ]] || failed=1
}

# measure NAME LIMIT_S COMMAND...: run COMMAND for at most LIMIT_S seconds, and add the end of its output to the report.
measure() {
    local name=$1 limit_s=$2 left_s=$((time_limit_s - SECONDS - 10)) started=$SECONDS code=0 outcome before
    shift 2
    [ ! -e "$out/$name.done" ] || return 0
    if [ -e "$out/$name.failed" ]; then
        tell "$name" "$(cat "$out/$name.failed"); delete $out/$name.failed to try it again"
        return 0
    elif ((left_s < limit_s / 3)); then
        tell "$name" "left out: $left_s of $time_limit_s s are left; call the script again"
        return 0
    fi
    before=$(gpu_state)
    timeout --kill-after=5 "$((left_s < limit_s ? left_s : limit_s))" "$@" >"$out/$name.log" 2>&1 || code=$?
    case $code in
    0) outcome="done in $((SECONDS - started)) s" ;;
    124 | 137) outcome="killed after $((SECONDS - started)) s" ;;
    *) outcome="failed with exit code $code" ;;
    esac
    {
        printf '## %s\n\n    %s\n\n```\n%s\n```\n\n' "$name" "$*" "$(tail -n 60 "$out/$name.log")"
        printf 'clock, power, heat, throttled: before %s; after %s\n\n' "${before:-unknown}" "$(gpu_state)"
        printf '%s\n\n' "$outcome"
    } >>"$report"
    tell "$name" "$outcome"
    # Killed without the time that it needs it was not tried.
    [ "$code" != 124 ] || ((left_s >= limit_s)) || return 0
    echo "$outcome" >"$out/$name.$([ "$code" = 0 ] && echo done || echo failed)"
}

cl_train=("$PYTHON" -m cl_train)
if [ "$dry_run" = true ]; then
    size=32 batch=4 half=auto cores=1 per_class=4 rounds=1 best=() pytest=(--collect-only)
    resnet50=tests.networks:small small=$resnet50 zoo=$resnet50 seconds=0.1
    steps=(max_steps=14 log_every=2 warmup_steps=4 data.synthetic_images=256)
else
    size=224 batch=256 half=fp16 cores=$(nproc) per_class=3000 rounds=3 best=(compile=true cuda_graph=true) pytest=()
    resnet50=resnet50 small=resnet18,mobilenet_v2,squeezenet1_1 zoo=resnet50,vgg16,mobilenet_v2,shufflenet_v2_x1_0 seconds=10
    steps=(max_steps=80 log_every=20 warmup_steps=20 data.synthetic_images=65536) # one epoch: the device never drains
fi
step=("device=$device" "data.image_size=$size" "time_limit_s=$seconds")
resnet50_step=("${cl_train[@]}" benchmark "model=$resnet50" "batch_size=$batch" "${step[@]}")
run=("$PYTHON" train.py "model=$resnet50" "precision=$half" "batch_size=$batch" "device=$device" "data.image_size=$size"
    epochs=50 evaluate_every=-1 checkpoint.every_epochs=0 overwrite=true "${steps[@]}")
tests=("$PYTHON" -m pytest -q tests/test_gpu.py -p no:cacheprovider "${pytest[@]}")
recording=tests/test_gpu.py::test_a_step_that_cannot_be_recorded # alone: before torch 2.15 it leaves the allocator recording

# The whole trainer on one fixed batch, channels_last against contiguous: on an H100 4,600 to 5,000 and 2,600 to 2,900 images/s are
# expected, and 5,500 to 6,000 of the best path. A contiguous run far below means a wrong set-up.
measure channels_last 90 "${run[@]}" channels_last=true data=synthetic "hydra.run.dir=$out/channels_last"
measure contiguous 90 "${run[@]}" channels_last=false data=synthetic "hydra.run.dir=$out/contiguous"
measure eager 100 "${resnet50_step[@]}" "precision=$half" cuda_graph=false "out=$out/eager.json" overwrite=true
measure tests 110 "${tests[@]}" -m "gpu and not slow" --deselect "$recording"
# At 32 images the host limits eager steps: near 1, and above 1.4 as a graph.
measure b32 100 "${cl_train[@]}" benchmark "model=$resnet50" batch_size=32 "${step[@]}" "precision=$half" cuda_graph=false,true parity=false "out=$out/b32.json" overwrite=true
measure best 200 "${run[@]}" channels_last=true "${best[@]}" data=synthetic profile=true "hydra.run.dir=$out/best"
measure graph 100 "${resnet50_step[@]}" "precision=$half" cuda_graph=true "out=$out/graph.json" overwrite=true
# JPEGs of ImageNet's size on all cores: at least 0.6 of the fixed batch.
measure images 200 "$PYTHON" -c "
from pathlib import Path
from cl_train.data.sample import SampleSpec, ensure_sample
ensure_sample(Path('$out/images'), SampleSpec(train_per_class=$per_class, val_per_class=1))"
measure jpegs 200 "${run[@]}" channels_last=true "${best[@]}" data=folder "data.root=$out/images" "data.workers=$cores" \
    profile=true "hydra.run.dir=$out/jpegs"
measure compiled 240 "${resnet50_step[@]}" "precision=$half" "${best[@]}" "out=$out/compiled.json" overwrite=true
measure bf16 100 "${resnet50_step[@]}" precision=bf16 "out=$out/bf16.json" overwrite=true
measure operators 150 "${cl_train[@]}" audit "model=$resnet50" "${step[@]}" "precision=$half" time=true "out=$out/operators.json" overwrite=true
measure loader 200 "${cl_train[@]}" loader_benchmark "data.root=$out/images" "data.workers=$cores" "data.image_size=$size" \
    "batch_size=$batch" images=$((per_class * 2)) "rounds=$rounds" "out=$out/loader.json" overwrite=true
measure small 240 "${cl_train[@]}" benchmark "model=$small" batch_size=32 "${step[@]}" "precision=$half" "out=$out/small.json" overwrite=true
measure zoo 400 "${cl_train[@]}" zoo "model=$zoo" batch_size=$((batch / 2)) "${step[@]}" "precision=$half" "out=$out/zoo"
measure recording 100 "${tests[@]/tests\/test_gpu.py/$recording}"
measure slow_tests 400 "${tests[@]}" -m "gpu and slow"
for precision in tf32 fp16_o2; do
    measure "$precision" 100 "${resnet50_step[@]}" "precision=$precision" "out=$out/$precision.json" overwrite=true
done
echo "$report"
exit $failed
