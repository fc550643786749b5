"""What errors of obstore mean: it has no types for most of them."""

import errno
import re

from obstore.exceptions import UnauthenticatedError

# Signs in the text of an error. The store cannot be reached, or is overloaded, whatever it was asked for:
_UNREACHABLE = ("kind: Connect", "kind: Timeout", "kind: Request", "kind: Interrupted")
_STATUS = re.compile(r"status code: (\d{3})")
_NOT_IMPLEMENTED = 501
_PASSING_STATUS = (408, 429)  # and those of 500 and more
_CODE = re.compile(r"<Code>(\w+)</Code>")
_PASSING_CODES = {
    "InternalError", "OperationAborted", "RequestTimeout", "ServiceUnavailable", "SlowDown", "Throttling",
    "TooManyRequests",
}  # fmt: skip
# It answers, and would refuse every other request as well:
_CODES_OF_ALL = {
    "AuthorizationHeaderMalformed", "ExpiredToken", "InvalidAccessKeyId", "InvalidToken", "NoSuchBucket",
    "RequestExpired", "RequestTimeTooSkewed", "SignatureDoesNotMatch", "TokenRefreshRequired",
}  # fmt: skip
_ERROR_OF_FILES = re.compile(r"Generic LocalFileSystem error: .*\(os error (\d+)\)\s*$", re.MULTILINE)
_ERRORS_OF_ALL = {str(errno.EROFS), str(errno.ENOTCONN)}  # of a file system, not of one file
# Permanent:
_REFUSED = ("dns error", "ertificate")
_REQUEST = re.compile(r"Generic \w+ error: Error performing \w+ \S+ in .*? - ")  # before what went wrong
_OF_FILES = re.compile(r"Generic LocalFileSystem error: (.*?)(?: \(os error \d+\))?\s*(?:\n|$)")  # names the path
_METADATA_SERVERS = ("169.254.169.254", "169.254.170.2", "metadata.google.internal")


def is_outage(error: BaseException) -> bool:
    """Whether the store cannot be reached, has failed or is overloaded, whatever it was asked for."""
    text = str(error)
    if any(sign in text for sign in _UNREACHABLE) or (_codes(text) & _PASSING_CODES):
        return True
    status = int(found[1]) if (found := _STATUS.search(text)) else 0
    return status in _PASSING_STATUS or (status >= 500 and status != _NOT_IMPLEMENTED)


def concerns_all(error: BaseException) -> bool:
    """Whether an error applies to every object: an outage, or for instance credentials that have expired."""
    text = str(error)
    of_files = _ERROR_OF_FILES.search(text)
    return (
        is_outage(error)
        or isinstance(error, UnauthenticatedError)
        or bool(_codes(text) & _CODES_OF_ALL)
        or bool(of_files and of_files[1] in _ERRORS_OF_ALL)
    )


def _codes(text: str) -> set[str]:
    """The codes in an answer of S3."""
    return set(_CODE.findall(text))


def may_answer_later(error: BaseException) -> bool:
    """Whether the store is not there now, but may be later."""
    text = str(error)
    return is_outage(error) and not any(s in text for s in _REFUSED + _METADATA_SERVERS)


def reason(error: BaseException) -> str:
    """What went wrong, from an error of obstore, which has the request, the answer and a debug dump in many lines."""
    text = str(error)
    if any(server in text for server in _METADATA_SERVERS):
        return f"{type(error).__name__}: no credentials in the environment, and no metadata server"
    if found := _OF_FILES.match(text):
        return f"{type(error).__name__}: {found[1]}"
    text = _REQUEST.sub("", text)
    for pattern in (r"<Code>(\w+)</Code>", r'(?:message|error): "([^"]+)"', r"kind: (Timeout)"):
        if found := re.search(pattern, text):
            return f"{type(error).__name__}: {found[1]}"
    return f"{type(error).__name__}: {' '.join(text.split('Debug source')[0].split())[:200]}"
