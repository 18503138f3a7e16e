# Sourced by the other scripts: installs the build tools that are missing (Debian, Ubuntu), and finds nvcc.

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

# Whether a GPU can be used here: a driver that lists one, and a compiler for it.
have_gpu() { command -v nvidia-smi >/dev/null && nvidia-smi -L 2>/dev/null | grep -q GPU && find_nvcc; }
