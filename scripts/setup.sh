# Sourced by neso-up and neso-test. Creates .venv and installs the package; reinstalls it only when its inputs changed.

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
        echo "neso: a C++ compiler is needed (Debian, Ubuntu: apt-get install g++), or a wheel of this version in dist/" >&2
        return 1
    fi
}

# Fingerprint of everything that requires a new installation: the compiled sources, the dependencies, and the list of
# Python files. Python files run from the checkout, but an editable installation records which packages exist.
fingerprint() {
    {
        cat pyproject.toml constraints.txt CMakeLists.txt scripts/setup.sh $(find csrc -type f | sort)
        find neso -name '*.py' | sort
    } | cksum
}

# quietly WHAT COMMAND ...: run the command with its output in .venv/install.log. A terminal shows what it does and for
# how long; a failure shows the end of the log.
quietly() {
    local what="$1" log=.venv/install.log start=$SECONDS status=0 pid
    shift
    echo "neso: $what (details: $log)"
    "$@" >"$log" 2>&1 &
    pid=$!
    trap 'kill "$pid"; exit 130' INT TERM
    while [ -t 1 ] && kill -0 "$pid" 2>/dev/null; do
        printf '\r\033[K      %d s  %s' $((SECONDS - start)) "$(progress "$log")"
        sleep 1
    done
    wait "$pid" || status=$?
    trap - INT TERM
    if [ -t 1 ]; then printf '\r\033[K'; fi
    if [ "$status" -ne 0 ]; then
        tail -n 20 "$log" >&2
        echo "neso: $what failed after $((SECONDS - start)) s; $log has everything" >&2
        return "$status"
    fi
    echo "neso: done in $((SECONDS - start)) s"
}

# The last package that pip works on, or the compiler's progress, such as [12/48] or [ 25%].
progress() {
    grep -aoE '^ *\[ *[0-9]+(/[0-9]+|%)\]|^ *(Collecting|Downloading|Installing collected packages) *[^ ;(<>=!~]*' "$1" |
        tail -n 1 | sed -E 's/^ *\[/compiling [/; s/-[0-9].*//; s/^ *//'
}

# The wheel to install instead of compiling; empty if there is none. It is in dist/ or the folder $NESO_WHEELS. If that is
# a URL, a page with links to wheels, pip downloads one from there to dist/, unless one in dist/ fits.
find_wheel() {
    local folder="${NESO_WHEELS:-dist}"
    if [[ "$folder" == *://* ]]; then
        local page="$folder"
        folder=dist
        if [ -z "$(fitting_wheel dist)" ]; then
            .venv/bin/python -m pip download -q --disable-pip-version-check --no-index --no-deps --only-binary :all: \
                --find-links "$page" -d dist "neso-server==$(sed -n 's/^version = "\(.*\)"$/\1/p' pyproject.toml)" >&2 ||
                echo "neso: no fitting wheel at $page" >&2
        fi
    fi
    fitting_wheel "$folder"
}

fitting_wheel() {
    if compgen -G "$1/neso_server-*.whl" >/dev/null; then .venv/bin/python scripts/find_wheel.py "$1"; fi
}

# link_compiled_modules FOLDER: link the compiled modules of an installed wheel into the checkout. Python puts the current
# folder first with `-m` and `-c`, so programs that run in the checkout import its sources.
link_compiled_modules() { ln -sf "$PWD/$1"/*.so neso/; }

# The functions below run under `set -e`. Don't call them in `&&`, `||` or `if`: that would disable it inside them,
# and a failed installation would be marked as complete.

# installed STAMP STATE: the stamp has this state.
installed() { [ -x .venv/bin/neso ] && [ -f "$1" ] && [ "$(cat "$1")" = "$2" ]; }

# install NAME EXTRAS: pip install the package with these extras unless the stamp of this fingerprint exists. The
# installation for the tests includes the base installation. Without extras, a fitting wheel is installed if there is
# one; otherwise the checkout is compiled, and installed in editable mode.
install() {
    local state wheel="" pip=(.venv/bin/python -m pip install --disable-pip-version-check -c constraints.txt)
    state="$(fingerprint)"
    if installed .venv/.neso-tests "$state"; then return; fi
    if [ ! -x .venv/bin/python ]; then
        local python
        python="$(find_python)"
        echo "neso: creating .venv with $("$python" --version)"
        "$python" -m venv .venv
    fi
    if [ -z "$2" ]; then wheel="$(find_wheel)"; fi
    if installed ".venv/.neso-$1" "$state$wheel"; then return; fi
    rm -f .venv/.neso-base .venv/.neso-tests neso/*.so
    # The name of the distribution was neso until 0.1.0; both would own the same files.
    .venv/bin/python -m pip uninstall -q -y neso 2>/dev/null
    if [ -n "$wheel" ]; then
        .venv/bin/python -m pip uninstall -q -y neso-server 2>/dev/null
        quietly "installing $wheel, without compiling" "${pip[@]}" "$wheel"
        link_compiled_modules .venv/lib/python3*/site-packages/neso
    else
        check_compiler
        quietly "installing${2:+ with $2}; compiling takes about two minutes on two cores, downloads come on top" \
            "${pip[@]}" -v -e ".$2"
    fi
    echo "$state$wheel" >".venv/.neso-$1"
}

setup_base() { install base ""; }
setup_tests() { install tests "[dev]"; }

# Slurm, for the tests of deploy/slurm, which are skipped without it. Installed only by root with apt.
setup_slurm() {
    if [ "$(id -u)" -eq 0 ] && command -v apt-get >/dev/null && ! command -v slurmctld >/dev/null; then
        echo "neso: installing Slurm for the tests of deploy/slurm"
        apt-get install -y --no-install-recommends slurm-wlm munge >/dev/null 2>&1 || echo "neso: Slurm cannot be installed"
    fi
}

# Redis, for the tests of the response cache in Redis, which are skipped without it. Installed only by root with apt.
setup_redis() {
    if [ "$(id -u)" -eq 0 ] && command -v apt-get >/dev/null && ! command -v redis-server >/dev/null; then
        echo "neso: installing Redis for the tests of the response cache"
        apt-get install -y --no-install-recommends redis-server >/dev/null 2>&1 || echo "neso: Redis cannot be installed"
    fi
}

# Chromium and playwright (together 450 MB), for the tests of the dashboard, which are skipped without them. Chromium is
# installed only by root with apt.
setup_chromium() {
    if [ "$(id -u)" -eq 0 ] && command -v apt-get >/dev/null && ! command -v chromium >/dev/null; then
        echo "neso: installing Chromium for the tests of the dashboard"
        apt-get install -y --no-install-recommends chromium >/dev/null 2>&1 || echo "neso: Chromium cannot be installed"
    fi
    if command -v chromium >/dev/null && ! .venv/bin/python -c "import playwright" 2>/dev/null; then
        .venv/bin/python -m pip install -q --disable-pip-version-check -c constraints.txt playwright ||
            echo "neso: playwright cannot be installed"
    fi
}

# nats-server, for the tests of servers that share workers, which are skipped without it. Installed only by root with apt.
setup_nats() {
    if [ "$(id -u)" -eq 0 ] && command -v apt-get >/dev/null && ! command -v nats-server >/dev/null; then
        echo "neso: installing nats-server for the tests of shared workers"
        apt-get install -y --no-install-recommends nats-server >/dev/null 2>&1 || echo "neso: nats-server cannot be installed"
    fi
}

# Real vLLM (CPU build) for the tests of its backend, in .venv-vllm because it pins other versions.
setup_vllm() {
    local stamp=".venv-vllm/.neso" state
    state="$(cat scripts/install_vllm.py constraints.txt constraints-vllm.txt .venv/pyvenv.cfg | cksum)"
    if [ -f "$stamp" ] && [ "$(cat "$stamp")" = "$state" ]; then
        return
    fi
    echo "neso: installing vLLM for the tests of its backend (some minutes, 1.5 GB)"
    rm -rf .venv-vllm
    .venv/bin/python scripts/install_vllm.py .venv-vllm
    echo "$state" >"$stamp"
}

# Triton's perf_analyzer, for tests/conformance/test_perf_analyzer.py, which are skipped without it. Debian on x86-64 only.
# genai-perf and aiperf (2.1 GB) are left out: see bench/install_perf_tools.sh.
setup_perf_analyzer() {
    export NESO_PERF_TOOLS="${NESO_PERF_TOOLS:-$PWD/.perf-tools}"
    if command -v apt-get >/dev/null && [ ! -x "$NESO_PERF_TOOLS/bin/perf_analyzer" ]; then
        echo "neso: installing perf_analyzer for the tests of its requests"
        bench/install_perf_tools.sh "$NESO_PERF_TOOLS" perf_analyzer >/dev/null 2>&1 || echo "neso: perf_analyzer cannot be installed"
    fi
}
