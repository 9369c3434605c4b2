#!/usr/bin/env bash
# Runs a program on emulated nodes: one machine, a torchrun per node, and a slow network between them.
# Usage: launch/emulate_nodes.sh --nodes N --ranks-per-node K [--link-rate 100mbit] [--latency 1ms] \
#            -- pretrain_gpt.py FLAGS…
# On CPUs (needs root) each node is a network namespace with one link to a common switch. --link-rate limits the
# rate into a node and out of it, --latency delays what leaves it; ranks of one node use its loopback. At the
# end the script prints the bytes that left each node, as counted by the kernel.
# On GPUs nodes are NCCL's: ranks of different nodes use TCP over loopback, whose rate cannot be set. They may
# share GPUs; CUDA_VISIBLE_DEVICES selects the GPUs, and an empty value selects CPUs.
# When a node fails, the others are ended, and its exit status becomes this script's. Node 0 writes to the
# terminal unchanged, the others to stderr with their number in front.
set -euo pipefail
# shellcheck source=launch/ports.sh
source "$(dirname "${BASH_SOURCE[0]}")/ports.sh"
# shellcheck source=launch/secret.sh
source "$(dirname "${BASH_SOURCE[0]}")/secret.sh"

say() { echo "launch/emulate_nodes.sh: $*" >&2; }
refuse() { say "$*"; exit 2; }
usage="usage: launch/emulate_nodes.sh --nodes N --ranks-per-node K [--link-rate RATE] [--latency TIME] -- PROGRAM.py FLAGS…"

python=${PYTHON:-python3}
nodes='' ranks='' rate='' latency=''
while (($# > 0)) && [[ $1 != -- ]]; do
    (($# > 1)) || refuse "$usage"
    case $1 in
        --nodes) nodes=$2 ;;
        --ranks-per-node) ranks=$2 ;;
        --link-rate) rate=$2 ;;
        --latency) latency=$2 ;;
        *) refuse "$1: unknown; $usage" ;;
    esac
    shift 2
done
(($# > 1)) || refuse "-- PROGRAM.py: missing; $usage"
shift
[[ $nodes =~ ^[1-9][0-9]{0,2}$ && $nodes -le 250 ]] || refuse "--nodes '$nodes': must be from 1 to 250"
[[ $ranks =~ ^[1-9][0-9]{0,3}$ ]] || refuse "--ranks-per-node '$ranks': must be a whole number, 1 or more"
[[ $rate =~ ^([1-9][0-9]*[kmg]bit)?$ ]] || refuse "--link-rate '$rate': must be like 100mbit (kbit, mbit, gbit)"
[[ $latency =~ ^([0-9]+[mu]s)?$ ]] || refuse "--latency '$latency': must be like 1ms or 500us"

mapfile -t gpus < <(nvidia-smi -L 2>/dev/null | sed -n 's/^GPU \([0-9]*\):.*/\1/p')
if ((${#gpus[@]} > 0)) && [[ -v CUDA_VISIBLE_DEVICES ]]; then
    IFS=, read -ra gpus <<<"$CUDA_VISIBLE_DEVICES"
fi
if ((${#gpus[@]} > 0)); then
    [[ -z $rate$latency ]] || refuse "--link-rate, --latency: NCCL over loopback cannot be shaped; leave them out"
    ((ranks <= ${#gpus[@]})) || refuse "--ranks-per-node $ranks: NCCL wants a GPU for each rank of a node, and" \
        "there are ${#gpus[@]}"
else
    ((EUID == 0)) || refuse "network namespaces need root; start it with sudo"
    for tool in ip tc; do
        command -v "$tool" >/dev/null || refuse "$tool is missing; on Debian and Ubuntu install iproute2"
    done
fi

# Ends everything that the run of process $1 started, and removes its namespaces.
remove() {
    local processes namespace
    for _ in {1..50}; do # processes started while the list was made are in the next list
        # grep's status is ignored: it is 2 if a process has ended in between.
        mapfile -t processes < <(grep -lszx "EMULATE_NODES=$1" /proc/[0-9]*/environ | cut -d/ -f3)
        ((${#processes[@]} > 0)) || break
        kill -KILL "${processes[@]}" 2>/dev/null || true
        sleep 0.1
    done
    for namespace in /run/netns/zpp-"$1"-*; do
        [[ ! -e $namespace ]] || ip netns delete "${namespace##*/}"
    done
}

pids=() prefixers=()
finish() {
    trap '' INT TERM HUP # a second Ctrl-C must not interrupt the cleanup
    local deadline=$((SECONDS + 10))
    ((${#pids[@]} == 0)) || kill -TERM "${pids[@]}" 2>/dev/null || true # torchrun ends its ranks
    while ((${#pids[@]} > 0 && SECONDS < deadline)) && kill -0 "${pids[@]}" 2>/dev/null; do sleep 0.1; done
    remove $$
    wait "${prefixers[@]}" || true # for their last lines
}
trap finish EXIT
trap 'exit 129' HUP
trap 'exit 130' INT
trap 'exit 143' TERM

# Joins every node to a switch. With packets of 65,000 bytes TCP's headers (66 bytes each) are negligible, so
# that the counters can be compared with the bytes of the collectives.
connect() {
    local switch=zpp-$$-switch node name
    ip netns add "$switch"
    ip -n "$switch" link add name switch type bridge
    ip -n "$switch" link set switch up
    for ((node = 0; node < nodes; node++)); do
        name=zpp-$$-node$node
        ip netns add "$name"
        ip -n "$name" link add name uplink mtu 65000 type veth peer name "node$node" mtu 65000 netns "$switch"
        ip -n "$name" address add "10.77.0.$((node + 1))/24" dev uplink
        ip -n "$name" link set lo up
        shape "$name" uplink "$latency"
        shape "$switch" "node$node" ''
        ip -n "$name" link set uplink up
        ip -n "$switch" link set "node$node" master switch up
    done
}

# Limits the rate out of device $2 of namespace $1, and delays packets by $3.
shape() {
    local parent=root
    if [[ -n $3 ]]; then
        tc -n "$1" qdisc add dev "$2" root handle 1: netem delay "$3" limit 100000 2>/dev/null ||
            refuse "--latency $latency: this kernel has no netem (module sch_netem)"
        parent='parent 1:1'
    fi
    # The queue is larger than TCP's window, because a lost packet would be sent and counted again.
    # shellcheck disable=SC2086 # $parent is two words
    [[ -z $rate ]] || tc -n "$1" qdisc add dev "$2" $parent handle 2: tbf rate "$rate" burst 128kb limit 64mb
}

# The counter of bytes sent: of a node's uplink, or of the loopback that the nodes of GPUs share.
sent() {
    if ((${#gpus[@]} > 0)); then
        cat /sys/class/net/lo/statistics/tx_bytes
    else
        ip netns exec "zpp-$$-node$1" cat /sys/class/net/uplink/statistics/tx_bytes
    fi
}

for namespace in /run/netns/zpp-*-switch; do
    run=${namespace#*/zpp-} run=${run%-switch}
    if [[ -e $namespace ]] && ! grep -qs emulate_nodes "/proc/$run/cmdline"; then
        say "removing what the killed run $run left behind"
        remove "$run"
    fi
done

master=10.77.0.1 interface=uplink
if ((${#gpus[@]} > 0)); then
    master=127.0.0.1 interface=lo
    sent_before=$(sent 0)
else
    connect
fi
port=$(free_port "$python")
threads=$(($(nproc) / (nodes * ranks)))
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-$((threads > 0 ? threads : 1))}
export GLOO_SOCKET_IFNAME=$interface NCCL_SOCKET_IFNAME=$interface NCCL_IB_DISABLE=1
export PYTHONUNBUFFERED=1 TORCH_CPP_LOG_LEVEL=${TORCH_CPP_LOG_LEVEL:-ERROR} # it warns of addresses without names

for ((node = 0; node < nodes; node++)); do
    # setsid: the terminal's Ctrl-C does not reach the node in addition to our TERM. setpriv: the kernel sends that
    # TERM if this script is killed.
    command=(setsid setpriv --pdeathsig TERM env "EMULATE_NODES=$$")
    address=$master
    if ((${#gpus[@]} > 0)); then
        visible=()
        for ((rank = 0; rank < ranks; rank++)); do
            visible+=("${gpus[(node * ranks + rank) % ${#gpus[@]}]}")
        done
        command+=("NCCL_HOSTID=node$node" "CUDA_VISIBLE_DEVICES=$(IFS=,; echo "${visible[*]}")")
    else
        address=10.77.0.$((node + 1))
        command+=(ip netns exec "zpp-$$-node$node")
    fi
    command+=("$python" -m torch.distributed.run --nnodes "$nodes" --node-rank "$node" --nproc-per-node "$ranks"
        --master-addr "$master" --master-port "$port" --local-addr "$address" "$@")
    if ((node == 0)); then
        "${command[@]}" &
        pids+=($!)
    else
        exec {prefixed}> >(trap '' INT; exec sed -u "s/^/node $node: /" >&2)
        prefixers+=($!)
        "${command[@]}" >&"$prefixed" 2>&1 {prefixed}>&- &
        pids+=($!)
        exec {prefixed}>&-
    fi
done

while ((${#pids[@]} > 0)); do
    for node in "${!pids[@]}"; do
        if ! kill -0 "${pids[node]}" 2>/dev/null; then
            status=0
            wait "${pids[node]}" || status=$?
            unset "pids[node]"
            ((status == 0)) || { say "node $node failed with status $status"; exit "$status"; }
        fi
    done
    sleep 0.2
done

if ((${#gpus[@]} > 0)); then
    echo "bytes that went over loopback, all nodes together: $(($(sent 0) - sent_before))"
else
    line="bytes that left each node:"
    for ((node = 0; node < nodes; node++)); do line+=" node $node $(sent "$node"),"; done
    echo "${line%,}"
fi
