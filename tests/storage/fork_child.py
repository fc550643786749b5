"""A process with a file tier that forks, as an engine whose scheduler of each data-parallel rank is a forked process.

    python -m tests.storage.fork_child DIRECTORY

It prints what the test compares. It is a process of its own because JAX warns of forks.
"""

import dataclasses
import os
import sys
from pathlib import Path

from tests.storage.conformance import SPEC, key_of, write
from tpu_offload.errors import ConfigError
from tpu_offload.storage.file import FileTier


def main() -> None:
    directory = Path(sys.argv[1])
    spec = dataclasses.replace(SPEC, options=f"{directory},min_free_gb=0")
    tier = FileTier(spec)
    write(tier, key_of(1), 1)
    ours, theirs = os.pipe()
    has_closed, tells = os.pipe()
    child = os.fork()
    if not child:
        status = 1
        try:
            os.close(theirs)
            fd = os.open(directory / "another", os.O_RDWR | os.O_CREAT)  # it has the number that the lock had
            tier.close()
            status = int(os.write(fd, b"x") != 1)
            os.write(tells, b"x")
            os.read(ours, 1)  # until the parent closes its end
        finally:
            os._exit(status)
    os.close(tells)
    os.read(has_closed, 1)  # until the child has run so far, or has ended
    try:
        FileTier(spec)
    except ConfigError as e:
        print(e)
    tier.close()
    again = FileTier(spec)
    print(again.stored_keys() == [key_of(1)])
    again.close()
    os.close(theirs)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))


if __name__ == "__main__":
    main()
