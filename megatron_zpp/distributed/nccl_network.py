"""What decides which network NCCL uses between nodes: its settings, and the ports and cards of this machine.

NCCL's rules are those of its public source (2.28): src/misc/param.cc for settings, src/plugin/net.cc for
plugins, src/transport/net_ib.cc and net_socket.cc for the networks.
"""

import ctypes
import os
import pwd
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from megatron_zpp.storage.regular import read_limited

PLUGIN = "libnccl-net.so"  # what NCCL loads where NCCL_NET_PLUGIN is not set
_CONF_BYTES = 1 << 20


@dataclass(frozen=True)
class NcclSettings:
    """NCCL's variables as it will read them: value and origin, by name."""

    values: Mapping[str, tuple[str, str]]

    def get(self, name: str) -> str | None:
        """The value; None where the variable is absent or empty."""
        value, _ = self.values.get(name, ("", ""))
        return value or None

    def describe(self, name: str) -> str:
        """The variable, its value and where it is set."""
        value, origin = self.values[name]
        return f"{name} is {value} ({origin})"


@dataclass(frozen=True)
class Network:
    """What a machine has that NCCL would look at."""

    active_ports: tuple[str, ...] = ()  # of InfiniBand and RoCE
    vendors: tuple[tuple[str, str], ...] = ()  # interface and PCI vendor, of cards
    plugin: bool = False  # a network plugin is installed


def read_nccl_settings(
    environment: Mapping[str, str], root: Path = Path("/"), home: Path | None = None
) -> NcclSettings:
    """NCCL's variables: from the environment, then NCCL_CONF_FILE or ~/.nccl.conf, then /etc/nccl.conf.

    The first one that sets a variable wins. `home` is by default the user's home in the password database,
    where NCCL looks, and not $HOME. A file that cannot be read sets nothing, for NCCL neither.
    """
    values = {name: (value, "environment") for name, value in environment.items() if name.startswith("NCCL_")}
    if home is None:
        with suppress(KeyError):  # a container's user may have no entry
            home = Path(pwd.getpwuid(os.getuid()).pw_dir)
    named = environment.get("NCCL_CONF_FILE")
    users = Path(named) if named else home and home / ".nccl.conf"
    for file in (users, root / "etc/nccl.conf"):
        if file is None:
            continue
        with suppress(OSError):
            text = read_limited(file, _CONF_BYTES).decode(errors="replace")
            for name, value in parse_conf(text).items():
                values.setdefault(name, (value, str(file)))
    return NcclSettings(values)


def parse_conf(text: str) -> dict[str, str]:
    """The variables of an nccl.conf, whose lines are NAME=VALUE, taken literally, or begin with #.

    As in NCCL, the first of several values counts.
    """
    found: dict[str, str] = {}
    for line in text.split("\n"):
        name, equals, value = line.partition("=")
        if equals and not line.startswith("#"):
            found.setdefault(name, value)
    return found


def read_network(root: Path = Path("/"), loads: Callable[[str], bool] | None = None) -> Network:
    """What the machine whose files are under `root` has; `loads` says whether a library can be loaded."""
    ports = []
    for state in sorted((root / "sys/class/infiniband").glob("*/ports/*/state")):
        with suppress(OSError):
            if "ACTIVE" in state.read_text():
                ports.append(f"{state.parents[2].name} port {state.parent.name}")
    vendors = []
    for vendor in sorted((root / "sys/class/net").glob("*/device/vendor")):
        with suppress(OSError):
            vendors.append((vendor.parents[1].name, vendor.read_text().strip()[:6]))
    return Network(tuple(ports), tuple(vendors), (loads or _loads)(PLUGIN))


def other_network(settings: NcclSettings, network: Network) -> str | None:
    """Why NCCL would use another network than TCP; None if it would use TCP."""
    net = settings.get("NCCL_NET")
    if net is not None:
        return None if net.lower() == "socket" else settings.describe("NCCL_NET")
    plugin = settings.get("NCCL_NET_PLUGIN")
    if plugin is not None and plugin.lower() != "none":
        return settings.describe("NCCL_NET_PLUGIN")
    if plugin is None and network.plugin:
        return f"the network plugin {PLUGIN} is installed"
    if network.active_ports and settings.get("NCCL_IB_DISABLE") in (None, "0"):
        return f"{network.active_ports[0]} is an active port of InfiniBand or RoCE"
    return None


def _loads(library: str) -> bool:
    """Whether the loader finds the library, as NCCL will ask it, or it lies beside the loaded NCCL."""
    with suppress(OSError):
        ctypes.CDLL(library)
        return True
    with suppress(OSError):
        lines = Path("/proc/self/maps").read_text().splitlines()
        loaded = {Path(line.split(maxsplit=5)[-1]) for line in lines if "/libnccl.so" in line}
        return any((file.parent / library).exists() for file in loaded)
    return False
