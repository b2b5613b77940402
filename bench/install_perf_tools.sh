#!/bin/sh
# Install perf_analyzer, genai-perf (0.9 GB) and aiperf (1.2 GB) into a folder, all by default:
#   bench/install_perf_tools.sh FOLDER [perf_analyzer] [genai-perf] [aiperf]
# FOLDER/bin then has the commands, for bench/perf_client.py --tools FOLDER and NESO_PERF_TOOLS=FOLDER of the tests.
# perf_analyzer is the binary of tritonclient 2.47 with two libraries (Debian, x86-64): the package perf_analyzer that
# genai-perf installs has no binary. genai-perf runs the perf_analyzer in FOLDER/bin.
set -eu
mkdir -p "$1/bin"
cd "$1"
folder=$PWD
shift
[ $# -gt 0 ] || set -- perf_analyzer genai-perf aiperf

install_perf_analyzer() {
    rm -rf downloads files
    python3 -m pip download -q --no-deps -d downloads tritonclient==2.47.0 nvidia-cuda-runtime-cu12
    (cd downloads && apt-get download -q libb64-0d)
    for wheel in downloads/*.whl; do python3 -m zipfile -e "$wheel" files; done
    for package in downloads/*.deb; do dpkg-deb -x "$package" files; done
    rm -r downloads
    binary=$folder/files/tritonclient-2.47.0.data/data/bin/perf_analyzer
    chmod +x "$binary"
    libraries=$(dirname "$(find "$folder/files" -name 'libb64.so.0d' | head -1)"):$folder/files/nvidia/cuda_runtime/lib
    # genai-perf starts it with its own environment, so the wrapper sets the path of the libraries.
    printf '#!/bin/sh\nLD_LIBRARY_PATH=%s exec %s "$@"\n' "$libraries" "$binary" > bin/perf_analyzer
    chmod +x bin/perf_analyzer
}

install_python_tool() {
    python3 -m venv "venvs/$1"
    "venvs/$1/bin/pip" install -q "$1"
    printf '#!/bin/sh\nPATH=%s:$PATH exec %s "$@"\n' "$folder/bin" "$folder/venvs/$1/bin/$1" > "bin/$1"
    chmod +x "bin/$1"
}

for tool; do
    case $tool in
        perf_analyzer) install_perf_analyzer ;;
        genai-perf | aiperf) install_python_tool "$tool" ;;
        *) echo "unknown tool: $tool" >&2; exit 2 ;;
    esac
done
