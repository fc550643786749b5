"""All metadata is in setup.cfg. Here, most of `tpu_offload.core` is compiled with mypyc (see tpu_offload/native.py).

It takes 2 to 10 minutes and a C compiler. The environment variable COMPILE_TPU_OFFLOAD says what happens: 0 compiles
nothing, 1 fails where it cannot be done; by default the package is then installed without. Editable installs are never
compiled.
"""

import contextlib
import glob
import os
import sys

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext
from setuptools.errors import BaseError, CCompilerError

WANTED = os.environ.get("COMPILE_TPU_OFFLOAD", "")
# What engines make. Compiled classes would check the types of their fields before we do, with errors that say less.
INTERPRETED = ("__init__.py", "engine_api.py")
# jax and others are not there when pip builds the package.
OPTIONS = ("--config-file=", "--ignore-missing-imports", "--follow-imports=silent", "--always-true=COMPILES")
REQUIRES = ["mypy==2.4.*", "numpy>=2.0"]  # to compile
WITHOUT = "tpu_offload is installed without compiled modules; its scheduler takes about twice the time"


class Build(build_ext):
    """Leaves out what cannot be compiled, unless it is wanted."""

    def run(self) -> None:
        """Compiles the modules, or none of them."""
        for path in glob.glob(os.path.join(self.build_lib, "**", "*.so"), recursive=True):
            os.remove(path)  # of an earlier build, maybe of a module that is not compiled any more
        try:
            super().run()
        except (BaseError, CCompilerError) as e:
            if WANTED == "1":
                raise
            self.warn(f"{WITHOUT}: {e}")
            for path in self.get_outputs():
                with contextlib.suppress(FileNotFoundError):
                    os.remove(path)
            self.extensions = []


def extensions() -> list[Extension]:
    """The modules to compile; none unless a wheel is built."""
    if WANTED == "0" or not {"bdist_wheel", "build_ext"} & {*sys.argv}:
        return []
    paths = sorted(glob.glob("tpu_offload/core/**/*.py", recursive=True))
    compiled = [path for path in paths if os.path.basename(path) not in INTERPRETED]
    try:
        from mypyc.build import mypycify

        made = mypycify([*OPTIONS, *compiled], opt_level="2", group_name="tpu_offload_core")
    except (Exception, SystemExit) as e:  # it exits with what mypy has found
        if WANTED == "1":
            raise
        sys.stderr.write(f"warning: {WITHOUT}: mypyc has failed: {e}\n")
        return []
    for extension in made:
        extension.extra_compile_args.append("-g0")  # else 40 MB
        # All of it is one source file, and only the functions that make modules are called from outside. Those are
        # exported whatever this says. Without it each call inside goes through a table, and is never inlined.
        extension.extra_compile_args.append("-fvisibility=hidden")
    return made


if WANTED not in ("", "0", "1"):
    sys.exit(f"COMPILE_TPU_OFFLOAD={WANTED}; expected 0, 1, or nothing")
# pip asks for requirements by this command, in an environment without them.
setup_requires = REQUIRES if WANTED != "0" and sys.argv[1:] == ["egg_info"] else []
setup(ext_modules=extensions(), cmdclass={"build_ext": Build}, setup_requires=setup_requires)
