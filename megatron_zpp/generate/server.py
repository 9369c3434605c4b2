"""The server: which addresses it answers, with which handlers, and how it begins and ends."""

import logging
from typing import Any

from aiohttp import web

from megatron_zpp.generate.http_errors import errors_as_json
from megatron_zpp.generate.http_limits import AllowedHosts
from megatron_zpp.generate.megatron_api import MegatronApi
from megatron_zpp.generate.openai_api import OpenaiApi
from megatron_zpp.generate.server_log import OneLine, say
from megatron_zpp.generate.server_options import ServerOptions
from megatron_zpp.generate.service import Service
from megatron_zpp.model.gpt import GPT
from megatron_zpp.tokenizer.base import Tokenizer

_GRACE = 5.0  # seconds that running requests have left at SIGTERM


def run(model: GPT, tokenizer: Tokenizer, options: ServerOptions, name: str) -> None:
    """Answer until SIGTERM or Ctrl-C; running requests get some seconds. Raises OSError for a port."""
    service = Service(model, tokenizer, options, name)
    try:
        web.run_app(
            application(service, options),
            host=options.host,
            port=options.port,
            print=lambda *_: say(f"listening on http://{options.host}:{options.port}/api and /v1"),
            access_log=None,
            handler_cancellation=True,  # when the client leaves
            # aiohttp waits so long for the handlers, then once more for those that it has told to end.
            shutdown_timeout=_GRACE / 2,
        )
    finally:
        service.close()


def application(service: Service, options: ServerOptions) -> web.Application:
    """Return the application, which answers only requests addressed to this server."""
    logger = logging.Logger("megatron_zpp.serve")  # not among those that a library configures
    logger.addHandler(OneLine())
    middlewares: list[Any] = [errors_as_json, AllowedHosts(options.host, options.allowed_hosts).check]
    app = web.Application(
        client_max_size=options.max_request_bytes,
        middlewares=middlewares,
        # Compressed bodies are refused, so none is ever expanded: a megabyte can become a gigabyte.
        handler_args={"auto_decompress": False, "logger": logger},
    )
    openai = OpenaiApi(service)
    app.router.add_put("/api", MegatronApi(service).generate)
    app.router.add_post("/v1/completions", openai.complete)
    app.router.add_get("/v1/models", openai.models)
    app.router.add_get("/v1/models/{name:.+}", openai.model)
    return app
