"""The structure that the code promises, read from its imports."""

import ast
from pathlib import Path

import pytest

import tpu_offload

PACKAGE = Path(tpu_offload.__file__).parent
FOUNDATION = {"errors", "types", "values", "config", "layout", "hashing", "metrics", "profile"}
PARTS = {"core", "kernels", "memory", "tiers"}
FRONTS = {"adapters", "sim"}

# part -> the parts it may import; "" is the package itself, which is the public interface.
ALLOWED = (
    dict.fromkeys(FOUNDATION, FOUNDATION)
    | {"core": FOUNDATION | {"core"}}
    | {part: FOUNDATION | (PARTS - {"core"}) for part in PARTS - {"core"}}
    | {"worker": FOUNDATION | PARTS | {"worker"}}
    | {part: {""} | FOUNDATION | PARTS | {"worker", part} for part in FRONTS}
    | {"engine": {"", "engine"}}  # it shows what any other engine can do with the public interface
    | {"cli": {""} | FOUNDATION | PARTS | {"worker", "cli", "engine"} | FRONTS}
)


def modules():
    return {path.relative_to(PACKAGE).as_posix(): ast.parse(path.read_text()) for path in sorted(PACKAGE.rglob("*.py"))}


MODULES = modules()
INITS = [path for path in MODULES if path.endswith("__init__.py")]


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
                yield from (f"tpu_offload.{a.name}" if a.name in ALLOWED else "tpu_offload" for a in node.names)
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


@pytest.mark.parametrize("path", [path for path in MODULES if part_of(path) in FOUNDATION | {"core"}])
def test_decisions_know_no_arrays(path):
    assert not {name.split(".")[0] for name in imported(MODULES[path])} & {"jax", "jaxlib", "flax", "libtpu"}


@pytest.mark.parametrize("path", [path for path in MODULES if part_of(path) != "adapters"])
def test_only_adapters_know_other_engines(path):
    assert not {name.split(".")[0] for name in imported(MODULES[path])} & {"vllm", "tpu_inference"}


def reads_environment(tree):
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and node.attr in ("environ", "environb", "getenv"):
            return True
        if isinstance(node, ast.ImportFrom) and node.module == "os":
            return any(alias.name in ("environ", "environb", "getenv") for alias in node.names)
    return False


@pytest.mark.parametrize("path", MODULES)
def test_only_config_reads_the_environment(path):
    assert reads_environment(MODULES[path]) == (path == "config.py")


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
    "CopyPath",
    "EvictionPolicy",
    "EvictionPolicyName",
    "FailedLoad",
    "FinishedTransfer",
    "FusedCopies",
    "FusedInputs",
    "FusedOutcome",
    "FusedStep",
    "HostStore",
    "InputError",
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
    "SwapJob",
    "SwapMode",
    "SwapPart",
    "TierEvent",
    "TierEventKind",
    "TransferJob",
    "Update",
    "Use",
    "WorkerSetup",
    "choose_victims",
]


# --- these rules can fail -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("path", "source", "wrong"),
    [
        ("core/scheduler.py", "from tpu_offload.kernels import programs", {"kernels"}),
        ("core/scheduler.py", "import tpu_offload", {""}),
        ("core/scheduler.py", "from tpu_offload import OffloadConfig", {""}),
        ("core/scheduler.py", "from tpu_offload import config, worker", {"worker"}),
        ("config.py", "def f():\n    from tpu_offload.core.staging import X", {"core"}),
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
def test_a_look_at_the_environment_is_found(source):
    assert reads_environment(ast.parse(source))
    assert not reads_environment(ast.parse("import os\nos.cpu_count()"))
