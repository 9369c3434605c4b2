"""Flags of the server: its address and its limits."""

from dataclasses import dataclass

from megatron_zpp.config.options import Options, option


@dataclass(frozen=True, kw_only=True)
class ServerOptions(Options):
    """server: its address and its limits"""

    host: str = option("127.0.0.1", "Address to listen on; 0.0.0.0 lets the whole network in.")
    allowed_hosts: tuple[str, ...] = option(
        (),
        "Names in the Host line of requests that are answered, besides localhost and --host.",
    )
    port: int = option(5000, "Port to listen on.", at_least=1, below=2**16)
    served_model_name: str | None = option(
        None, "Name of the model in /v1; by default the directory of --load as given."
    )
    max_prompts: int = option(128, "Texts that a request may ask for: prompts, times n in /v1.", at_least=1)
    max_request_bytes: int = option(1 << 20, "Size of a request.", at_least=1)
    max_waiting: int = option(
        128, "Requests that may be here beyond --batch-size; the next ones are refused.", at_least=0
    )
    request_timeout: float = option(
        120.0, "Seconds that a request may take once it has arrived, with its waiting.", above=0
    )
    body_timeout: float = option(10.0, "Seconds in which a request has to arrive.", above=0)
    batch_size: int = option(16, "Texts that are written at once; others join as these end.", at_least=1)
