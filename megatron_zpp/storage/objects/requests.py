"""Requests to an object store with Amazon S3's protocol: bounded retries, and errors of one line.

The package boto3 finds credentials, region and endpoint where all tools of AWS do: in AWS_ACCESS_KEY_ID,
AWS_SECRET_ACCESS_KEY, AWS_PROFILE, AWS_REGION, AWS_ENDPOINT_URL and in the files of ~/.aws.
"""

import errno
import functools
import os
import random
import re
import time
from typing import Any

from megatron_zpp.storage.object_errors import Conflict, NoObject, ObjectError

_LOGIN = re.compile(r"//[^/@\s]*@")
ATTEMPTS = 5  # of a request
_PAUSE = 1.0  # seconds on average before the second attempt; doubled for each further one: 15 s in all
_CONNECT_SECONDS, _READ_SECONDS = 10, 30  # without an answer, after which an attempt has failed
_CONNECTIONS = 32  # per process
INSTALL = "needs the package boto3; install it: pip install boto3"

_DENIED = "the store denies {what}; give credentials that may do that"
_REASONS = {  # error codes of S3; {what} is the request, {message} what the store says
    "NoSuchBucket": "the bucket does not exist; create it, or name another",
    "AccessDenied": _DENIED,
    "403": _DENIED,
    "InvalidAccessKeyId": "the store does not know the access key; correct AWS_ACCESS_KEY_ID or the profile",
    "SignatureDoesNotMatch": "the secret key is wrong; correct AWS_SECRET_ACCESS_KEY or the profile",
    "ExpiredToken": "the credentials have expired; renew them",
    "PermanentRedirect": "the bucket is in another region; correct AWS_REGION",
}
_BUSY = ("InternalError", "RequestLimitExceeded", "RequestTimeout", "SlowDown", "Throttling")  # error codes


class NoUpload(ObjectError):
    """The upload has been completed or aborted."""


class Unanswered(ObjectError):
    """No answer came, or one that says to try again. The request may have been carried out all the same."""


def request(url: str, operation: str, **arguments: Any) -> dict[str, Any]:
    """Return the answer to one request of boto3's client. Raises ObjectError, of which `url` is the file.

    What the store lists in several answers, each to a request of its own, is returned as one. The "Body" of
    an object, or of a range of it, is bytes. A request without an answer, or whose body arrives incomplete,
    is sent again, also if it is not known whether it was carried out.
    """
    for number in range(ATTEMPTS):
        if number:  # ranks that were refused at the same moment do not come back at the same moment
            time.sleep(_PAUSE * 2 ** (number - 1) * random.uniform(0.5, 1.5))
        try:
            answer = _attempt(url, operation, **arguments)
            return answer | {"Body": _read(url, answer["Body"])} if "Body" in answer else answer
        except Unanswered as error:
            last = error
    last.strerror = f"{last.strerror}; tried {ATTEMPTS} times"
    raise last


def _attempt(url: str, operation: str, **arguments: Any) -> dict[str, Any]:
    try:
        import botocore.exceptions

        client = _client(os.getpid())
        if client.can_paginate(operation):
            return client.get_paginator(operation).paginate(**arguments).build_full_result()
        return getattr(client, operation)(**arguments)
    except ModuleNotFoundError:
        raise ObjectError(errno.ENOPKG, INSTALL, url) from None
    except botocore.exceptions.ClientError as error:
        raise _refused(url, operation, error.response) from None
    except botocore.exceptions.NoCredentialsError:
        reason = "no credentials; set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE"
        raise ObjectError(errno.EACCES, reason, url) from None
    except (botocore.exceptions.HTTPClientError, botocore.exceptions.ConnectionError) as error:
        raise _silent(url, error) from None
    except (botocore.exceptions.BotoCoreError, ValueError) as error:
        raise ObjectError(errno.EINVAL, _one_line(error), url) from None


def _read(url: str, body: Any) -> bytes:
    import botocore.exceptions
    import urllib3.exceptions  # of a connection that is lost in the middle of a body

    try:
        with body:
            return body.read()
    except (botocore.exceptions.BotoCoreError, urllib3.exceptions.HTTPError, OSError) as error:
        raise _silent(url, error) from None


@functools.lru_cache(maxsize=1)
def _client(process: int) -> Any:
    """Return a client, which threads may share; each process needs its own connections."""
    import boto3
    from botocore.config import Config

    config = Config(
        retries={"mode": "standard", "total_max_attempts": 1},  # `_repeated` repeats, at a pace of its own
        connect_timeout=_CONNECT_SECONDS,
        read_timeout=_READ_SECONDS,
        max_pool_connections=_CONNECTIONS,
    )
    return boto3.session.Session().client("s3", config=config)


def _refused(url: str, operation: str, answer: dict[str, Any]) -> ObjectError:
    """Return the error for an answer that is not a success."""
    found = answer.get("Error", {})
    code, message = str(found.get("Code", "")), " ".join(str(found.get("Message", "")).split())
    status = answer.get("ResponseMetadata", {}).get("HTTPStatusCode")
    if code in ("NoSuchKey", "404"):
        return NoObject(errno.ENOENT, "no such object", url)
    if code == "NoSuchUpload":
        return NoUpload(errno.ENOENT, f"the store refuses {operation}: {code} {message}".rstrip(), url)
    if status in (409, 412):
        return Conflict(errno.EEXIST, "another process has written it", url)
    if code in _REASONS:
        return ObjectError(errno.EACCES, _REASONS[code].format(what=operation), url)
    busy = code in _BUSY or (status is not None and (status >= 500 or status == 429))
    kind = Unanswered if busy else ObjectError
    return kind(errno.EIO, f"the store refuses {operation}: {code} {message}".rstrip(), url)


def _silent(url: str, error: BaseException) -> ObjectError:
    return Unanswered(errno.EIO, f"the server does not answer ({_one_line(error)})", url)


def _one_line(error: BaseException) -> str:
    """The message without what AWS_ENDPOINT_URL may have before its host: a name and a password."""
    return _LOGIN.sub("//…@", " ".join(str(error).split())) or type(error).__name__
