# An image with both trainers, train_fp8 (CPU) and train_fp8cu (GPU), and the tools to build and test them.
#
#   docker build -t train_fp8 .                               # for Hopper (H100, H200)
#   docker build -t train_fp8 --build-arg CUDA_ARCH=89 .      # for another GPU: its compute capability
#   docker run --rm --gpus all train_fp8                      # scripts/quickstart.sh: trains a model, tells a story
#   docker run --rm train_fp8                                 # the same on the CPU
#   docker run --rm --gpus all --ipc=host -v "$PWD/data:/train_fp8/data" -v "$PWD/checkpoints:/train_fp8/checkpoints" \
#       train_fp8 mpirun -np 4 ./train_fp8cu llama3.1-8b --precision fp8 --checkpoint-dir checkpoints/8b
#
# A command after the image's name replaces the quickstart. GPUs need NVIDIA's container toolkit on the host. Several
# GPUs need --ipc=host: NCCL and Open MPI share memory between ranks.
# train_fp8 and build/synth_stories are compiled for the CPU that builds the image (-march=native). On another CPU,
# compile them again: docker run --rm train_fp8 sh -c 'make -B train_fp8 build/synth_stories && scripts/quickstart.sh'
FROM nvidia/cuda:13.0.0-devel-ubuntu24.04
SHELL ["/bin/bash", "-euo", "pipefail", "-c"]
WORKDIR /train_fp8

# Build tools and Open MPI, by the function that the scripts use. python3-venv is for data/setup_venv.sh and
# scripts/setup_report.sh, sshd for scripts/mpijob.yaml, where each worker pod makes host keys of its own.
COPY scripts/install.sh scripts/install.sh
RUN . scripts/install.sh && install_tools \
    && apt-get update -qq && apt-get install -y -qq --no-install-recommends ca-certificates openssh-server \
        python3-venv \
    && rm -f /etc/ssh/ssh_host_* \
    && if ! find_nccl; then apt-get install -y -qq --no-install-recommends libnccl2 libnccl-dev; fi \
    && rm -rf /var/lib/apt/lists/*

# make reads CUDA_ARCH, here and later in a container. Containers run as root, for which mpirun needs two variables.
ARG CUDA_ARCH=90a
ENV CUDA_ARCH=$CUDA_ARCH OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1

COPY . .
RUN make

CMD ["scripts/quickstart.sh"]
