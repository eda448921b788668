#!/bin/bash
# Two or more machines on a switch, without any scheduler. On each of them, with its own number in place of 0:
#
#   RANKS=2 LINK=enp5s0 bash examples/clusters/two_desktops.sh 0 192.168.1.10 examples/gpt.toml strategy.name=auto
#
# 192.168.1.10 is machine 0, as the others reach it; LINK is what `ip -brief address` calls this machine's own cable.
set -euo pipefail
number=$1 first=$2
shift 2

export NCCL_SOCKET_IFNAME="$LINK" GLOO_SOCKET_IFNAME="$LINK"
exec torchrun --nnodes "${MACHINES:-2}" --node-rank "$number" --nproc-per-node "${RANKS:-1}" \
    --master-addr "$first" --master-port "${PORT:-29500}" \
    -m towpath train "$@"
