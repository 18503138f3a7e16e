# Sourced by other scripts. Handles --help, installs missing build tools (Debian, Ubuntu), finds nvcc and NCCL.

# For scripts without arguments: if --help is among the arguments, prints the usage and exits; else refuses the first
# argument. $1 text of --help, then the arguments.
take_none() {
    local usage=$1
    shift
    [ $# -gt 0 ] || return 0
    if [[ " $* " == *" --help "* ]]; then echo "$usage"; exit 0; fi
    echo "error: unknown argument \"$1\"; $0 --help prints the usage" >&2
    exit 2
}

say() { printf '\n== %s\n' "$*"; }

# Runs a command that prints little or nothing, and every 5 seconds prints how long it has taken, to stderr.
alive() {
    local begin=$SECONDS status=0
    while sleep 5 >/dev/null 2>&1 && kill -0 $$ 2>/dev/null; do echo "($((SECONDS - begin)) s)" >&2; done &
    local ticker=$!
    "$@" || status=$?
    kill -KILL $ticker  # after SIGTERM, a shell that has just been forked may run the EXIT trap of this one
    wait $ticker 2>/dev/null || :
    return $status
}

# Installs packages of Debian or Ubuntu, as root or by sudo. Ends the script if apt-get fails or is missing, or if there
# is no sudo for a user who is not root.
install_packages() {
    say "installing: $*"
    local sudo=()
    if [ "$(id -u)" -ne 0 ]; then
        command -v sudo >/dev/null ||
            { echo "error: not root and no sudo; install these packages by hand: $*" >&2; exit 1; }
        sudo=(sudo)
    fi
    command -v apt-get >/dev/null || { echo "error: no apt-get here; install these packages by hand: $*" >&2; exit 1; }
    alive "${sudo[@]}" apt-get update -qq &&
        alive "${sudo[@]}" env DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "$@" \
            >/dev/null || { echo "error: apt-get failed; install these packages by hand: $*" >&2; exit 1; }
}

install_tools() {
    local missing=()
    command -v gcc >/dev/null || missing+=(gcc libc6-dev)
    command -v g++ >/dev/null || missing+=(g++)
    command -v make >/dev/null || missing+=(make)
    command -v mpicc >/dev/null || missing+=(libopenmpi-dev)
    command -v mpirun >/dev/null || missing+=(openmpi-bin openssh-client)
    command -v python3 >/dev/null || missing+=(python3)
    [ ${#missing[@]} -eq 0 ] || install_packages "${missing[@]}"
}

# Installs what the report of a verdict needs: python3-venv, and libraries from PyPI. If that fails, prints the reason
# and lets the script go on.
install_report() {
    python3 -c 'import ensurepip, venv' 2>/dev/null || (install_packages python3-venv)
    PIP_RETRIES=1 PIP_DEFAULT_TIMEOUT=20 scripts/setup_report.sh 2>&1 >/dev/null | tail -n 1
}

find_nvcc() {
    command -v nvcc >/dev/null && return 0
    [ -x /usr/local/cuda/bin/nvcc ] && export PATH=/usr/local/cuda/bin:$PATH
    command -v nvcc >/dev/null
}

# Succeeds if NCCL_HOME is set (it is not checked), or if nccl.h is in a folder named below, or in the Python package
# nvidia-nccl, which PyTorch installs. In the last case it sets NCCL_HOME to the package's folder. If it finds nothing,
# it prints what to install and fails.
find_nccl() {
    local folder
    [ -n "${NCCL_HOME:-}" ] && return 0
    for folder in /usr /usr/local /usr/local/cuda; do [ -e "$folder/include/nccl.h" ] && return 0; done
    folder=$(python3 -c 'import nvidia.nccl; print(list(nvidia.nccl.__path__)[0])' 2>/dev/null)
    if [ -e "$folder/include/nccl.h" ]; then
        export NCCL_HOME=$folder
        return 0
    fi
    echo "NCCL is missing: install libnccl-dev (from NVIDIA's package repository) or the Python package" \
        "nvidia-nccl-cu13, or set NCCL_HOME"
    return 1
}

# True if the driver lists a GPU, whatever CUDA_VISIBLE_DEVICES says, and nvcc is installed.
have_gpu() { command -v nvidia-smi >/dev/null && nvidia-smi -L 2>/dev/null | grep -q '^GPU ' && find_nvcc; }
