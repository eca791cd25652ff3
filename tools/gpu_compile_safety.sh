#!/usr/bin/env bash
# Everything of the compile-safe runtime that needs a GPU, in one go; each part has its own time limit.
#   bash tools/gpu_compile_safety.sh probes | cold | cold2 | notebooks | launch | tests | all
# A protected launch takes about 70 s where three run at a time: with many more processes beside it, much longer.
# Results go to $OUT (default: runs/gpu_compile_safety); a summary is printed last.
set -u
cd "$(dirname "$0")/.."
PY=${PYTHON:-python3}
export OUT=${OUT:-runs/gpu_compile_safety}
mkdir -p "$OUT"
part=${1:-all}
codes=""

run() { # name limit command...
  local name=$1 limit=$2; shift 2
  local begin=$SECONDS
  timeout --kill-after=10 "$limit" "$@" > "$OUT/$name.log" 2>&1
  codes="$codes\n$name: exit $? after $((SECONDS - begin)) s"
}

if [[ $part == probes || $part == all ]]; then
  run overhead 120 "$PY" tools/gate_overhead.py
  run deadlock_off 200 "$PY" -c "from dflash.diagnose.probes import run_probe as r; print(r('lazy_backward_deadlock', False, limit=90))"
  run deadlock_on 200 "$PY" -c "from dflash.diagnose.probes import run_probe as r; print(r('lazy_backward_deadlock', True, limit=150))"
  run doctor 580 "$PY" -m dflash doctor --quick
fi
if [[ $part == cold || $part == all ]]; then
  run cold_one_gpu 420 "$PY" tools/cold_threads.py --devices cuda:0 --mode protected --processes 10 --jobs 3 --limit 240 --budget 300
  run cold_one_gpu_off 150 "$PY" tools/cold_threads.py --devices cuda:0 --mode unprotected --processes 4 --jobs 4 --limit 120
fi
if [[ $part == cold2 || $part == all ]]; then
  run cold_two_gpus 420 "$PY" tools/cold_threads.py --devices cuda:0,cuda:1 --mode protected --processes 10 --jobs 3 --limit 240 --budget 300
  run cold_two_gpus_off 150 "$PY" tools/cold_threads.py --devices cuda:0,cuda:1 --mode unprotected --processes 4 --jobs 4 --limit 120
fi
if [[ $part == notebooks || $part == all ]]; then
  run nb01 240 "$PY" tools/run_notebook.py notebooks/01_standalone_kernel.ipynb "$OUT/01_standalone_kernel.ipynb" --limit 230
  run nb02 240 "$PY" tools/run_notebook.py notebooks/02_drafter_forward.ipynb "$OUT/02_drafter_forward.ipynb" --limit 230
  run nb03 400 "$PY" tools/run_notebook.py notebooks/03_warmup.ipynb "$OUT/03_warmup.ipynb" --limit 390
fi
if [[ $part == launch || $part == all ]]; then
  run nb04 590 "$PY" tools/run_notebook.py notebooks/04_threaded_launch.ipynb "$OUT/04_threaded_launch.ipynb" --limit 580
fi
if [[ $part == tests || $part == all ]]; then
  run tests 590 "$PY" tools/run_gpu_tests.py --limit 250
fi
for log in "$OUT"/*.log; do echo "== $log"; tail -n 25 "$log" | cut -c1-300; done
echo -e "$codes"
