# Sourced by neso-up and neso-test: makes .venv and installs the package, once for each state of what it depends on.

MIN_PYTHON=10  # 3.10

find_python() {
    local candidate
    for candidate in ${PYTHON:-} python3 python3.13 python3.12 python3.11 python3.10; do
        if "$candidate" -c "import sys, venv; sys.exit(sys.version_info < (3, $MIN_PYTHON))" 2>/dev/null; then
            echo "$candidate"
            return
        fi
    done
    echo "neso: Python 3.$MIN_PYTHON or newer with the venv module is needed; set PYTHON to its path" >&2
    return 1
}

check_compiler() {
    if ! command -v "${CXX:-c++}" >/dev/null && ! command -v g++ >/dev/null && ! command -v clang++ >/dev/null; then
        echo "neso: a C++ compiler is needed (Debian, Ubuntu: apt-get install g++)" >&2
        return 1
    fi
}

# What decides whether an installation is still good: the compiled sources, the dependencies, and which Python files
# there are. These are used from the checkout, but an installation remembers which modules are packages.
fingerprint() {
    {
        cat pyproject.toml constraints.txt CMakeLists.txt scripts/setup.sh $(find csrc -type f | sort)
        find neso -name '*.py' | sort
    } | cksum
}

# install NAME EXTRAS: pip install the package with these extras unless .venv has it in this very state.
install() {
    local stamp=".venv/.neso-$1" state
    state="$(fingerprint)"
    if [ -x .venv/bin/neso ] && [ -f "$stamp" ] && [ "$(cat "$stamp")" = "$state" ]; then
        return
    fi
    check_compiler
    if [ ! -x .venv/bin/python ]; then
        local python
        python="$(find_python)"
        echo "neso: making .venv with $("$python" --version)"
        "$python" -m venv .venv
    fi
    echo "neso: installing${2:+ with $2} (about half a minute for the server, more for the tests)"
    .venv/bin/python -m pip install --disable-pip-version-check -c constraints.txt -e ".$2"
    echo "$state" >"$stamp"
}

# Real vLLM, its CPU build, in .venv-vllm: it pins versions that the rest does not. It is tried once for each state;
# where there is no build for the machine, the tests that need it are skipped.
install_vllm() {
    local stamp=".venv/.neso-vllm" state
    state="$(cat scripts/install_vllm.py constraints.txt constraints-vllm.txt .venv/pyvenv.cfg | cksum)"
    if [ -f "$stamp" ] && [ "$(cat "$stamp")" = "$state" ]; then
        return
    fi
    echo "neso: installing vLLM for the tests of its backend (some minutes, 1.5 GB)"
    rm -rf .venv-vllm
    if ! .venv/bin/python scripts/install_vllm.py .venv-vllm; then
        rm -rf .venv-vllm
        echo "neso: vLLM cannot be installed here, its tests are skipped; rm $stamp to try again" >&2
    fi
    echo "$state" >"$stamp"
}

setup_base() { install base ""; }
setup_tests() { install tests "[dev]" && install_vllm; }
