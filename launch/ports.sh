#!/usr/bin/env bash
# Chooses the port of the rendezvous on one machine. Sourced by local.sh and emulate_nodes.sh.

# free_port PYTHON: a free TCP port. It is below the kernel's ephemeral ports (from 32768 on Linux, from 49152
# elsewhere), because another connection could take one of those before the ranks start.
free_port() {
    "$1" -c 'import random, socket
ports = list(range(10_000, 32_000))
random.shuffle(ports)
for port in ports:
    with socket.socket() as free:
        try:
            free.bind(("", port))
        except OSError:
            continue
    print(port)
    break'
}
