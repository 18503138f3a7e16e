# Sourced by the other scripts: their --help; installs the build tools that are missing (Debian, Ubuntu), and finds nvcc.

# For scripts that take no arguments, before any work: $1 is what --help prints, the rest are the script's arguments.
take_none() {
    local usage=$1
    shift
    [ $# -gt 0 ] || return 0
    if [[ " $* " == *" --help "* ]]; then echo "$usage"; exit 0; fi
    echo "error: unknown argument \"$1\"; $0 takes none but --help" >&2
    exit 2
}

say() { printf '\n== %s\n' "$*"; }

install_tools() {
    local missing=()
    command -v gcc >/dev/null || missing+=(gcc libc6-dev)
    command -v g++ >/dev/null || missing+=(g++)
    command -v make >/dev/null || missing+=(make)
    command -v mpicc >/dev/null || missing+=(libopenmpi-dev)
    command -v mpirun >/dev/null || missing+=(openmpi-bin openssh-client)
    command -v python3 >/dev/null || missing+=(python3)
    [ ${#missing[@]} -eq 0 ] && return 0
    say "installing: ${missing[*]}"
    local sudo=()
    if [ "$(id -u)" -ne 0 ]; then
        command -v sudo >/dev/null || { echo "error: not root and no sudo; install these packages by hand: ${missing[*]}" >&2; exit 1; }
        sudo=(sudo)
    fi
    command -v apt-get >/dev/null || { echo "error: no apt-get here; install these packages by hand: ${missing[*]}" >&2; exit 1; }
    "${sudo[@]}" apt-get update -qq
    "${sudo[@]}" env DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "${missing[@]}" >/dev/null
}

find_nvcc() {
    command -v nvcc >/dev/null && return 0
    [ -x /usr/local/cuda/bin/nvcc ] && export PATH=/usr/local/cuda/bin:$PATH
    command -v nvcc >/dev/null
}

# NCCL's header and library: in the system's or CUDA's folders, where NCCL_HOME says, or in Python's package nvidia-nccl (PyTorch brings it).
find_nccl() {
    local folder
    [ -n "${NCCL_HOME:-}" ] && return 0
    for folder in /usr /usr/local /usr/local/cuda; do [ -e "$folder/include/nccl.h" ] && return 0; done
    folder=$(python3 -c 'import nvidia.nccl; print(list(nvidia.nccl.__path__)[0])' 2>/dev/null)
    if [ -e "$folder/include/nccl.h" ]; then
        export NCCL_HOME=$folder
        return 0
    fi
    echo "NCCL is missing: install libnccl-dev (from NVIDIA's package repository) or the Python package nvidia-nccl-cu13, or set NCCL_HOME"
    return 1
}

# Whether a GPU can be used here: a driver that lists one, and a compiler for it.
have_gpu() { command -v nvidia-smi >/dev/null && nvidia-smi -L 2>/dev/null | grep -q GPU && find_nvcc; }
