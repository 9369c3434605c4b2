"""Refusals and failures as JSON: in OpenAI's form below /v1, else as Megatron-LM's client prints them."""

import re

from aiohttp import web

from megatron_zpp.config.command_line import one_line
from megatron_zpp.generate.completion_request import FIELDS
from megatron_zpp.generate.http_limits import Handler
from megatron_zpp.generate.scheduler import GenerationFailed
from megatron_zpp.generate.server_log import say_traceback

_OPENAI = "/v1/"
_FIELD = re.compile(r"(\w+)(\[\d+\])? ")  # with which the message of a refused field begins
_CODES = {404: "not_found", 503: "overloaded", 504: "timeout"}


@web.middleware
async def errors_as_json(http: web.Request, handler: Handler) -> web.StreamResponse:
    """Answer every refused request with one line in JSON."""
    try:
        return await handler(http)
    except (ConnectionError, web.RequestPayloadError):
        # The client left in the middle of its request, or it is not HTTP: perhaps nobody reads this answer.
        return error_response(http, 400, "the request is not whole")
    except web.HTTPException as error:
        message = " ".join((error.text or error.reason).split())
        if error.status == 404 and error.text == "404: Not Found":
            message = f"{http.path}: not here; PUT /api, POST /v1/completions and GET /v1/models are"
        elif error.status == 405:
            allowed = " or ".join(sorted(set(error.headers.get("Allow", "").split(",")) - {"HEAD"}))
            message = f"{http.method} {http.path}: use {allowed}"
        kept = {name: value for name, value in error.headers.items() if name in ("Retry-After", "Allow")}
        return error_response(http, error.status, message, kept)
    except GenerationFailed as failure:  # the scheduler has said more on the server's terminal
        return error_response(http, 500, str(failure))
    except Exception as error:
        say_traceback()  # a bug of ours
        return error_response(http, 500, one_line(error))


def error_response(
    http: web.Request, status: int, message: str, headers: dict[str, str] | None = None
) -> web.Response:
    """The refusal of a request in the form of its endpoint."""
    content = openai_error(status, message) if http.path.startswith(_OPENAI) else {"message": message}
    return web.json_response(content, status=status, headers=headers)


def openai_error(status: int, message: str) -> dict[str, object]:
    """OpenAI's form of an error; `param` is the refused field, if the message begins with one."""
    field = _FIELD.match(message) if status in (400, 404) else None
    return {
        "error": {
            "message": message,
            "type": "invalid_request_error" if status < 500 else "server_error",
            "param": field[1] if field and field[1] in FIELDS else None,
            "code": _CODES.get(status),
        }
    }
