#!/bin/sh
# Install perf_analyzer and aiperf into a folder, for bench/perf_client.py: bench/install_perf_tools.sh FOLDER [--no-aiperf]
# perf_analyzer is the binary of tritonclient 2.47 with two libraries (Debian, x86-64). aiperf needs about 1.2 GB.
set -eu
mkdir -p "$1"
cd "$1"
python3 -m pip download -q --no-deps -d downloads tritonclient==2.47.0 nvidia-cuda-runtime-cu12
(cd downloads && apt-get download libb64-0d)
for wheel in downloads/*.whl; do python3 -m zipfile -e "$wheel" files; done
for package in downloads/*.deb; do dpkg-deb -x "$package" files; done
binary=$PWD/files/tritonclient-2.47.0.data/data/bin/perf_analyzer
chmod +x "$binary"
libraries=$(dirname "$(find "$PWD/files" -name 'libb64.so.0d' | head -1)"):$PWD/files/nvidia/cuda_runtime/lib
printf '#!/bin/sh\nLD_LIBRARY_PATH=%s exec %s "$@"\n' "$libraries" "$binary" > perf_analyzer
chmod +x perf_analyzer
rm -r downloads
[ "${2:-}" = --no-aiperf ] || { python3 -m venv aiperf && aiperf/bin/pip install -q aiperf; }
