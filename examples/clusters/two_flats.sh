#!/bin/bash
# Machines that train together over the internet. Each is an island that comes and goes. On each of them:
#
#   LINK=wg0 bash examples/clusters/two_flats.sh 10.77.0.1 examples/two_flats.toml
#
# 10.77.0.1 is the address of one of them inside the VPN, and LINK is the interface of the VPN on this machine: wg0, or
# tailscale0. Each machine has a folder of its own for checkpoints and metrics.
set -euo pipefail
meet=$1 configuration=$2
shift 2

export NCCL_SOCKET_IFNAME="$LINK" GLOO_SOCKET_IFNAME="$LINK"
# PROGRAM has no quotes, because it may be several words.
exec torchrun --standalone --nproc-per-node "${RANKS:-1}" --max-restarts 100 ${PROGRAM:--m towpath} \
    train "$configuration" "strategy.outer.meet=$meet:${PORT:-29600}" "log.folder=runs/$(uname -n)" "$@"
