#!/bin/sh
# The same command on every host of a run, within ten minutes of the others:
#
#   HEAD=10.0.0.9 sh torchrun.sh -m tutorec.examples.dlrm --checkpoints /shared
#
# and once before, on the machine HEAD, which should be none of the hosts:
#
#   python -m tutorec.examples.rendezvous --port 29400
set -eu
: "${HEAD:?set it to the machine where tutorec.examples.rendezvous runs}"

# An agent that outlives another keeps the address of the first round's
# store, which may be gone by then: a new store for each round.
export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1

# --nnodes          fewest and most hosts
# --nproc-per-node  ranks of this host: a number, or auto, one for each GPU
# --rdzv-id         name of the run; agents of another name do not meet these
# --rdzv-conf       the store is HEAD's; seconds to wait for one more host
# --max-restarts    how many deaths the run survives
# --local-addr      of this host, where its name says nothing to the others
exec "${PYTHON:-python}" -m torch.distributed.run \
    --nnodes="${HOSTS:-1:2}" \
    --nproc-per-node="${RANKS:-auto}" \
    --rdzv-backend=c10d \
    --rdzv-endpoint="$HEAD:${PORT:-29400}" \
    --rdzv-id="${RUN:-dlrm}" \
    --rdzv-conf="is_host=false,${MEETING:-last_call_timeout=30}" \
    --max-restarts="${RESTARTS:-100}" \
    ${ADDRESS:+--local-addr="$ADDRESS"} \
    "$@"
