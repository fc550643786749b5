"""The structure of the package, checked by its imports."""

import ast
import configparser
import importlib.metadata
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import tpu_offload

PACKAGE = Path(tpu_offload.__file__).parent
ROOT = Path(__file__).parents[1]
FOUNDATION = {
    "errors",
    "types",
    "values",
    "config",
    "layout",
    "hashing",
    "piece_keys",
    "metrics",
    "copy_profile",
    "frozen",
    "native",
}
PARTS = {"core", "kernels", "memory"}
FRONTS = {"adapters", "sim"}
NO_JAX = FOUNDATION | {"core", "sim", "storage", "plan", "monitoring"}

# part -> the parts it may import; "" is the package itself, which is the public interface.
ALLOWED = (
    dict.fromkeys(FOUNDATION, FOUNDATION)
    | {"core": FOUNDATION | {"core"}}
    | {part: FOUNDATION | (PARTS - {"core"}) for part in PARTS - {"core"}}
    | {"storage": FOUNDATION | {"storage"}}
    | {"worker": FOUNDATION | PARTS | {"storage", "worker"}}
    | {part: {""} | FOUNDATION | PARTS | {"worker", part} for part in FRONTS}
    | {"engine": {"", "engine"}}  # it shows what any other engine can do with the public interface
    | {"monitoring": FOUNDATION | {"monitoring"}}
    | {"measure": {""} | FOUNDATION | (PARTS - {"core"}) | {"worker", "measure"}}
    | {"replay": FOUNDATION | {"memory", "engine", "measure", "replay", "sim"}}
    | {"plan": FOUNDATION | {"storage", "sim", "plan"}}
    | {"doctor": FOUNDATION | {"core", "memory", "storage", "measure", "doctor"}}
    # It parses, calls and prints.
    | {
        "cli": FOUNDATION
        | {"core", "storage", "engine", "measure", "replay", "sim", "plan", "doctor", "monitoring", "cli"}
    }
)


def modules():
    return {path.relative_to(PACKAGE).as_posix(): ast.parse(path.read_text()) for path in sorted(PACKAGE.rglob("*.py"))}


MODULES = modules()
INITS = [path for path in MODULES if path.endswith("__init__.py") and path != "__init__.py"]


def part_of(path):
    return path.split("/")[0].removesuffix(".py")


def imported(tree):
    """Full names of the modules that a file imports, wherever in it."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute here"
            if node.module == "tpu_offload":  # a module of it, or a name of the public interface
                names = [alias.name for alias in node.names if alias.name != "__version__"]
                yield from (f"tpu_offload.{name}" if name in ALLOWED else "tpu_offload" for name in names)
            else:
                yield node.module


def imported_parts(tree):
    for name in imported(tree):
        if name.split(".")[0] == "tpu_offload":
            yield [*name.split("."), ""][1]


def forbidden_imports(path, tree):
    return {part for part in imported_parts(tree) if part not in ALLOWED[part_of(path)]}


@pytest.mark.parametrize("path", [path for path in MODULES if path != "__init__.py"])
def test_imports_go_one_way(path):
    assert part_of(path) in ALLOWED, "a new part: say in ALLOWED what it may import"
    assert not forbidden_imports(path, MODULES[path])


@pytest.mark.parametrize("path", [path for path in MODULES if part_of(path) in NO_JAX])
def test_core_and_foundation_do_not_import_jax(path):
    assert not {name.split(".")[0] for name in imported(MODULES[path])} & {"jax", "jaxlib", "flax", "libtpu"}


@pytest.mark.parametrize("path", [path for path in MODULES if part_of(path) != "adapters"])
def test_only_adapters_import_other_engines(path):
    assert not {name.split(".")[0] for name in imported(MODULES[path])} & {"vllm", "tpu_inference"}


MAX_FILE_LINES, MAX_FUNCTION_LINES = 450, 60


def long_functions(tree):
    """Functions that are too long, their docstrings apart."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            docstring = ast.get_docstring(node, clean=False)
            num_lines = (node.end_lineno or 0) - node.lineno + 1 - (docstring.count("\n") + 1 if docstring else 0)
            if num_lines > MAX_FUNCTION_LINES:
                yield node.name


@pytest.mark.parametrize("path", MODULES)
def test_files_and_functions_are_short(path):
    """A file that is longer says why at its top."""
    num_lines = len((PACKAGE / path).read_text().splitlines())
    assert num_lines <= MAX_FILE_LINES or re.search(r"\blong,? because\b", ast.get_docstring(MODULES[path]) or "")
    assert list(long_functions(MODULES[path])) == []


def reads_environment(tree):
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and node.attr in ("environ", "environb", "getenv"):
            return True
        if isinstance(node, ast.ImportFrom) and node.module == "os":
            return any(alias.name in ("environ", "environb", "getenv") for alias in node.names)
    return False


@pytest.mark.parametrize("path", MODULES)
def test_only_config_reads_the_environment(path):
    assert reads_environment(MODULES[path]) == (path == "config/environment.py")


@pytest.mark.parametrize("path", MODULES)
def test_no_class_is_hidden_from_the_garbage_collector(path):
    """`mypyc_attr(acyclic=True)`: see `tpu_offload/native.py`."""
    assert not any(isinstance(node, ast.keyword) and node.arg == "acyclic" for node in ast.walk(MODULES[path]))


@pytest.mark.parametrize("path", INITS)
def test_init_files_re_export_and_nothing_else(path):
    body = MODULES[path].body
    names, exported = [], []
    for i, node in enumerate(body):
        if isinstance(node, ast.ImportFrom):
            names += [alias.asname or alias.name for alias in node.names]
        elif isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name) and node.targets[0].id == "__all__":
            exported = ast.literal_eval(node.value)
        else:
            assert i == 0, f"line {node.lineno} is no import and no __all__"
            assert isinstance(node.value.value, str), "expected a docstring"
    assert sorted(names) == sorted(exported), "__all__ is what is imported"


def test_the_package_loads_its_names_lazily():
    """It lists them three times, for type checkers, for the loader and in `__all__`, and has the version."""
    docstring, typing_import, version, choice, table, exported = MODULES["__init__.py"].body
    assert isinstance(docstring.value.value, str)
    assert ast.unparse(typing_import) == "from typing import TYPE_CHECKING"
    assert ast.unparse(choice.test) == "TYPE_CHECKING"
    imported = {alias.name: node.module for node in choice.body for alias in node.names}
    assert [node.name for node in choice.orelse] == ["__getattr__", "__dir__"]
    assert version.targets[0].id == "__version__"
    assert (table.targets[0].id, exported.targets[0].id) == ("_MODULES", "__all__")
    assert imported == ast.literal_eval(table.value)
    assert sorted(imported) == sorted(ast.literal_eval(exported.value))


@pytest.mark.parametrize("name", tpu_offload.__all__)
def test_public_names_exist(name):
    value = getattr(importlib.import_module(tpu_offload._MODULES[name]), name)
    assert getattr(tpu_offload, name) is value
    assert tpu_offload.__dict__[name] is value, "looked up once"
    assert name in dir(tpu_offload)


def test_other_names_do_not_exist():
    assert not hasattr(tpu_offload, "Offloader")
    with pytest.raises(AttributeError, match="module 'tpu_offload' has no attribute 'Offloader'"):
        _ = tpu_offload.Offloader  # type: ignore[attr-defined]
    with pytest.raises(ImportError, match="cannot import name 'Offloader' from 'tpu_offload'"):
        from tpu_offload import Offloader  # type: ignore[attr-defined]  # noqa: F401


def test_public_interface():
    """Adding to this list is a decision; removing from it breaks users."""
    assert tpu_offload.__all__ == PUBLIC


PUBLIC = [
    "BlockHash",
    "BlockHasher",
    "CacheEpoch",
    "CachedPrefix",
    "CachesLostError",
    "Candidate",
    "ChunkKey",
    "CompileError",
    "ConfigError",
    "CopyJob",
    "CopyPart",
    "CopyPath",
    "EvictionPolicy",
    "EvictionPolicyName",
    "FailedLoad",
    "FinishedTransfer",
    "FusedCopies",
    "FusedInputs",
    "FusedOutcome",
    "FusedStep",
    "HostDivision",
    "HostStore",
    "InputError",
    "JobKind",
    "JobResult",
    "JobState",
    "KVLayout",
    "LayerGroup",
    "LayerGroupKind",
    "LayoutError",
    "Match",
    "MatchState",
    "OffloadConfig",
    "OffloadError",
    "OffloadScheduler",
    "OffloadStats",
    "OffloadWorker",
    "PageGroup",
    "RankPlans",
    "RequestError",
    "RequestLimits",
    "RequestSwap",
    "Residents",
    "SaveEvent",
    "SavePolicy",
    "ScheduledRequest",
    "StagingError",
    "StatsCollector",
    "StepPlan",
    "StepReport",
    "SwapMode",
    "TierEvent",
    "TierEventKind",
    "TierStats",
    "Update",
    "Use",
    "WorkerSetup",
    "choose_victims",
]


# --- what an environment needs ------------------------------------------------------------------

# Prints, after each step, which of the packages that take long to import have been imported.
STARTS = """
import contextlib, importlib, io, json, pkgutil, sys

HEAVY = {"jax", "jaxlib", "flax", "jinja2", "plotly", "rich"}
seen = {}

def import_all(name):
    package = importlib.import_module(name)
    for module in pkgutil.walk_packages(package.__path__, f"{name}."):
        importlib.import_module(module.name)

def command(*argv):
    import tpu_offload_command

    sys.argv = ["tpu-offload", *argv]
    with contextlib.redirect_stdout(io.StringIO()):
        try:
            tpu_offload_command.run()
        except SystemExit as e:
            assert not e.code, e.code

for what, step, *args in (
    ("core", import_all, "tpu_offload.core"),
    ("sim", import_all, "tpu_offload.sim"),
    ("--help", command, "--help"),
    ("simulate --help", command, "simulate", "--help"),
    ("tier --help", command, "tier", "ls", "--help"),
    ("plan --help", command, "plan", "--help"),
    ("doctor --help", command, "doctor", "--help"),
    ("simulate", command, "simulate", "--trace", sys.argv[1], "--sizes", "1", "--num-layers", "1"),
):
    if what == "simulate":
        HEAVY.remove("rich")  # prints its tables
        args += ["--num-kv-heads", "1", "--head-size", "1"]
    step(*args)
    seen[what] = sorted(HEAVY & sys.modules.keys())
print(json.dumps(seen))
"""


def test_decisions_and_simulations_start_without_jax(tmp_path):
    trace = tmp_path / "t.jsonl"
    line = {"timestamp": 0, "input_length": 1024, "output_length": 1, "hash_ids": [1, 2]}
    trace.write_text(2 * (json.dumps(line) + "\n"))
    done = subprocess.run(
        [sys.executable, "-c", STARTS, trace],
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    seen = json.loads(done.stdout)
    assert list(seen) == [
        "core",
        "sim",
        "--help",
        "simulate --help",
        "tier --help",
        "plan --help",
        "doctor --help",
        "simulate",
    ]
    assert not any(seen.values()), seen


def requirements():
    """Names of the distributions that are installed always (the key is empty), and with each extra."""
    setup = configparser.ConfigParser()
    setup.read(ROOT / "setup.cfg")
    lines = {"": setup["options"]["install_requires"]} | dict(setup["options.extras_require"])
    return {extra: {normal(name) for name in re.findall(r"^[\w-]+", text, re.M)} for extra, text in lines.items()}


def normal(name):
    return name.lower().replace("_", "-")


REQUIRED = requirements()
DISTRIBUTIONS = importlib.metadata.packages_distributions()
# By vLLM's environment; the last is imported for mypyc only, which brings it.
PROVIDED = {"tpu_offload", "vllm", "tpu_inference", "ray", "mypy_extensions"}
EXTRAS = {  # by part or file, the first one of its own; the others need none
    "engine": ("engine",),
    "cli": ("cli", "engine"),
    "cli/html/charts.py": ("html",),
    "cli/html/page.py": ("html", "cli"),
    "doctor": ("cli",),
    "monitoring/files.py": ("monitoring",),
    "storage/object.py": ("object",),
    "storage/object_deletion.py": ("object",),
    "storage/object_errors.py": ("object",),
    "storage/object_inspection.py": ("object",),
    "storage/object_store.py": ("object",),
    "storage/valkey.py": ("valkey",),
    "storage/valkey_full.py": ("valkey",),
    "storage/valkey_inspection.py": ("valkey",),
    "storage/valkey_lookups.py": ("valkey",),
}


def extras_of(path):
    return EXTRAS.get(path) or EXTRAS.get(part_of(path), ())


def needed(path, tree):
    """Distributions that a file imports from."""
    names = {name.split(".")[0] for name in imported(tree)} - sys.stdlib_module_names - PROVIDED
    return {normal(distribution) for name in names for distribution in DISTRIBUTIONS.get(name, [name])}


@pytest.mark.parametrize("path", MODULES)
def test_imports_are_required(path):
    allowed = set.union(*(REQUIRED[extra] for extra in ("", *extras_of(path))))
    assert needed(path, MODULES[path]) <= allowed


def test_no_more_is_required_than_imported():
    used: dict[str, set[str]] = {
        extra: set() for extra in ("", "engine", "cli", "html", "monitoring", "object", "valkey")
    }
    for path, tree in MODULES.items():
        own, *others = extras_of(path) or ("",)
        used[own] |= needed(path, tree).difference(*(REQUIRED[extra] for extra in others))
    always = used.pop("") | {"jaxlib"}  # imported by jax; we set its lower bound
    assert REQUIRED[""] == always
    for extra, names in used.items():
        assert REQUIRED[extra] == names - always


# --- these rules can fail -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("path", "source", "wrong"),
    [
        ("core/scheduler.py", "from tpu_offload.kernels import programs", {"kernels"}),
        ("core/scheduler.py", "import tpu_offload", {""}),
        ("core/scheduler.py", "from tpu_offload import OffloadConfig", {""}),
        ("core/scheduler.py", "from tpu_offload import config, worker", {"worker"}),
        ("config/options.py", "def f():\n    from tpu_offload.core.staging import X", {"core"}),
        ("worker/worker.py", "from tpu_offload.engine import Engine", {"engine"}),
        ("engine/engine.py", "import tpu_offload.cli.main", {"cli"}),
        ("cli/main.py", "from tpu_offload.engine import Engine", set()),
    ],
)
def test_a_wrong_import_is_found(path, source, wrong):
    assert forbidden_imports(path, ast.parse(source)) == wrong


@pytest.mark.parametrize(
    "source",
    [
        "import os\nx = os.environ['X']",
        "import os\nos.getenv('X')",
        "from os import environ",
        "import os as o\no.environ",
    ],
)
def test_a_read_of_the_environment_is_found(source):
    assert reads_environment(ast.parse(source))
    assert not reads_environment(ast.parse("import os\nos.cpu_count()"))


def test_an_import_that_is_not_required_is_found():
    source = "def f():\n    from flax import nnx\n    import prometheus_client.core, vllm.config, json"
    assert needed("core/scheduler.py", ast.parse(source)) - REQUIRED[""] == {"flax"}


def test_a_long_function_is_found():
    body = "    x = 1\n"
    docstring = '    """A.' + "\n    b" * 20 + '"""\n'
    assert list(long_functions(ast.parse("def f():\n" + docstring + body * (MAX_FUNCTION_LINES - 1)))) == []
    assert list(long_functions(ast.parse("class C:\n  def f(self):\n" + body * MAX_FUNCTION_LINES))) == ["f"]
