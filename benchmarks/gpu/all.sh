#!/usr/bin/env bash
# Every test of the torch plugin's GPU code, then the benchmark of updates, where parallelkit is not
# installed: Python 3.12, torch and Triton suffice, with the wheels of requirements.txt in a folder.
#
#   benchmarks/gpu/all.sh RESULTS [WHEELS]
#
# RESULTS: a folder for update.json and the logs. WHEELS: a folder of wheels to be used, if any.
# PK_TEST_SECONDS and PK_BENCH_SECONDS bound both halves (230 and 200); python3 is PYTHON's default.
set -u
root=$(cd "$(dirname "$0")/../.." && pwd)
results=$(mkdir -p "$1" && cd "$1" && pwd)
python=${PYTHON:-python3}
site=$(mktemp -d)
trap 'rm -rf "$site"' EXIT

if [ -n "${2:-}" ]; then
    "$python" -m pip install -q --no-index --no-deps --no-compile --no-cache-dir --upgrade \
        --target "$site" "$2"/*.whl || exit 2
fi
# entry points, as an installation would have them
for name in parallelkit parallelkit_torch; do
    mkdir -p "$site/$name-0.1.0.dist-info"
    printf 'Metadata-Version: 2.1\nName: %s\nVersion: 0.1.0\n' "${name//_/-}" \
        > "$site/$name-0.1.0.dist-info/METADATA"
done
printf '[parallelkit.plugins]\ntorch = parallelkit_torch.plugin\n' \
    > "$site/parallelkit_torch-0.1.0.dist-info/entry_points.txt"
export PYTHONPATH="$site:$root:$root/plugins/parallelkit-torch${PYTHONPATH:+:$PYTHONPATH}"
export PYTHONUNBUFFERED=1

cd "$root" || exit 2
nvidia-smi --query-gpu=name,driver_version,memory.used,memory.total --format=csv || true
"$python" - <<'END' || exit 2
import sys, torch, attrs, pluggy, msgspec, zmq, xxhash, numpy
from importlib.metadata import PackageNotFoundError, version
import parallelkit
from parallelkit.loader import default_manager
print(sys.version)
for name in ("torch", "triton", "numpy", "attrs", "pluggy", "msgspec", "pyzmq", "xxhash"):
    try:
        print(name, version(name))
    except PackageNotFoundError:
        print(name, "is missing")
print("devices", torch.cuda.device_count(), "parallelkit", parallelkit.__file__)
for plugin in default_manager().load(strict=True).plugins:
    print("plugin", plugin.label)
END

status=0
echo "== tests"
timeout -k 10 "${PK_TEST_SECONDS:-230}" "$python" -m pytest -m gpu -p no:cacheprovider \
    --durations=15 --maxfail=12 plugins/parallelkit-torch/tests/cuda 2>&1 \
    | tee "$results/tests.log" | grep -v "^SKIPPED" | tail -n "${PK_TEST_LINES:-150}"
[ "${PIPESTATUS[0]}" = 0 ] || status=1
echo "== benchmark"
timeout -k 10 "$(( ${PK_BENCH_SECONDS:-200} + 40 ))" "$python" benchmarks/gpu/bench_update.py \
    --seconds "${PK_BENCH_SECONDS:-200}" --output "$results/update.json" ${PK_BENCH_OPTIONS:-} 2>&1 \
    | tee "$results/update.log"
[ "${PIPESTATUS[0]}" = 0 ] || status=1
exit $status
