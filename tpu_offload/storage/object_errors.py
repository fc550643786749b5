"""What errors of obstore mean: it has no types for them."""

import re

# Signs in an error of obstore, which has no types for them: the store may answer later, or never will.
_UNREACHABLE = ("kind: Connect", "kind: Timeout", "kind: Request", "kind: Interrupted", "status code: 5")
_REFUSED = ("dns error", "ertificate")
_REQUEST = re.compile(r"Generic \w+ error: Error performing \w+ \S+ in .*? - ")  # before what went wrong
_OF_FILES = re.compile(r"Generic LocalFileSystem error: (.*?)(?: \(os error \d+\))?\s*(?:\n|$)")  # names the path
_METADATA_SERVERS = ("169.254.169.254", "169.254.170.2", "metadata.google.internal")


def is_outage(error: BaseException) -> bool:
    """Whether the store cannot be reached or has failed, whatever it was asked for."""
    text = str(error)
    return any(sign in text for sign in _UNREACHABLE)


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
