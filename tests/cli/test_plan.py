"""`tpu-offload plan` end to end: what it prints and writes, its statuses, and bad flags."""

import contextlib
import io
import json
import shlex

import pytest

from tests.cli.conftest import ROOT
from tpu_offload.cli.main import main
from tpu_offload.plan.model_config import _SHAPES


@pytest.fixture
def plan(tmp_path, capsys):
    """Runs the command; returns its output and its report."""

    def run(*argv, status=0):
        path = tmp_path / "plan.json"
        path.unlink(missing_ok=True)
        capsys.readouterr()
        assert main(["plan", *map(str, argv), "--json", str(path)]) == status
        return capsys.readouterr().out, json.loads(path.read_text())

    return run


def error_of(*argv):
    err = io.StringIO()
    with contextlib.redirect_stderr(err):
        assert main(["plan", *map(str, argv)]) == 2
    said = err.getvalue()
    assert said.startswith("tpu-offload: error: ")
    assert said.count("\n") == 1, said
    return said


def test_a_plan(plan):
    said, report = plan("--model", "Llama-3.1-8B", "--machine", "v6e-8")
    assert report["fits"] is True
    assert report["kv_nbytes_per_token"] == 131_072
    assert report["block_nbytes"] == 131_072 * report["block_size"]
    assert report["hbm_kv_tokens"] == report["num_blocks"] * report["block_size"]
    assert report["host_gb"] * 2**30 == pytest.approx(0.8 * 1440e9, rel=0.01)
    low, high = report["break_even_gbps_by_prefix"]["8192"]
    assert low < report["break_even_gbps"] < high
    assert "scaling-book" in report["sources"]["machine"]
    assert report["command"] in said
    assert f"{report['hbm_kv_tokens']:,} tokens" in said
    assert report["tiers"][0]["tier"] == "host memory"
    assert "prefix of 131,072 tokens" in said


def test_the_command_is_one_for_a_shell(plan):
    _, report = plan("--model", "gemma-3-27b", "--machine", "v6e-8", "--decode-save", "--max-model-len", 32768)
    words = shlex.split(report["command"])
    assert words[:3] == ["vllm", "serve", "google/gemma-3-27b-it"]
    assert words[words.index("--max-model-len") + 1] == "32768"
    connector = json.loads(words[words.index("--kv-transfer-config") + 1])
    assert connector["kv_connector_extra_config"] == {"host_gb": report["host_gb"], "decode_save": True}


def test_what_does_not_fit(plan):
    """The figures that need no HBM are there all the same."""
    said, report = plan("--model", "qwen3.5-397b", "--machine", "v6e-8", status=1)
    assert (report["fits"], report["command"], report["hbm_kv_tokens"]) == (False, None, 0)
    assert report["state_nbytes"] == pytest.approx(192e6, rel=0.01)
    assert "the smallest machine on which it fits is v5p-32, or v5p-16 with --weights fp8" in report["why_not"]
    assert f"does not fit on v6e-8: {report['why_not']}." in said
    assert "vllm serve" not in said


def test_a_model_of_a_file(plan, tmp_path):
    config = {
        "architectures": ["LlamaForCausalLM"], "hidden_size": 2048, "intermediate_size": 8192,
        "num_hidden_layers": 16, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 64,
        "vocab_size": 128256, "max_position_embeddings": 131072, "tie_word_embeddings": True,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    _, report = plan("--model", tmp_path / "config.json", "--machine", "v5e-1", "--max-model-len", 16384)
    assert report["num_params"] == pytest.approx(1.236e9, rel=0.001)
    assert report["kv_nbytes_per_token"] == 16 * 8 * 128 * 2


def test_the_hit_rate_of_a_trace(plan, tmp_path):
    """Two prompts of 40 blocks, one after the other, three times; HBM has room for one and a half."""
    path = tmp_path / "trace.jsonl"
    prompts = [list(range(40)), list(range(100, 140))]
    lines = [
        {"timestamp": 1000 * i, "input_length": 40 * 512, "output_length": 1, "hash_ids": prompts[i % 2]}
        for i in range(6)
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    flags = ("--machine", "v5e-4", "--max-model-len", 24_576, "--tensor-parallel", 2, "--trace", path)
    _, report = plan("--model", "llama-3.1-8b", *flags, "--gpu-memory-utilization", 0.6)
    assert 40 < report["hbm_kv_tokens"] / 512 < 80
    hits = report["hits"]
    assert (hits["num_requests"], hits["prompt_tokens"]) == (6, 6 * 40 * 512)
    assert hits["hbm"] + hits["host"] == pytest.approx(4 / 6)
    assert hits["host"] == hits["host_bound"] > 0
    assert 0 < hits["saved_flops"] < hits["hbm"] + hits["host"]


@pytest.mark.parametrize("name", ["a[/z]b", "[bold]x", "plain"])
def test_names_are_printed_as_they_are(plan, tmp_path, name):
    folder = tmp_path.joinpath(*name.split("/"))
    folder.mkdir(parents=True)
    config = json.loads((_SHAPES / "llama-3.1-8b.json").read_text())
    (folder / "config.json").write_text(json.dumps({k: v for k, v in config.items() if k[0] != "_"}))
    said, report = plan("--model", folder, "--machine", "v6e-8")
    assert report["command"] in said
    assert shlex.split(report["command"])[2] == str(folder)


def test_files_are_not_overwritten(tmp_path):
    trace = tmp_path / "trace.jsonl"
    trace.write_text("x")
    flags = ("--model", "llama-3.1-8b", "--machine", "v6e-8", "--trace", trace, "--json", trace)
    assert "is the same file as the trace" in error_of(*flags)
    model = tmp_path / "config.json"
    model.write_text("{}")
    for given in (model, tmp_path):
        assert "is the same file as the model's" in error_of("--model", given, "--machine", "v6e-8", "--json", model)
    assert (trace.read_text(), model.read_text()) == ("x", "{}")


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (
            ("--model", "nonsense", "--machine", "v6e-8"),
            "--model 'nonsense' is no file; expected a config.json, or one",
        ),
        (("--model", "x" * 5000, "--machine", "v6e-8"), "is no file; expected a config.json, or one"),
        (("--model", "llama-3.1-8b", "--machine", "a100-8"), "--machine 'a100-8'; expected one of v5e-N"),
        (("--model", "llama-3.1-8b"), "Missing option '--machine'"),
        (("--machine", "v6e-8"), "Missing option '--model'"),
        (
            ("--model", "llama-3.1-8b", "--machine", "v6e-8", "--block-size", 48),
            "--block-size 48; expected a power of two",
        ),
        (("--model", "llama-3.1-8b", "--machine", "v6e-8", "--tensor-parallel", 3), "32 query heads"),
        (("--model", "llama-3.1-8b", "--machine", "v6e-8", "--tensor-parallel", 0), "--tensor-parallel"),
        (("--model", "llama-3.1-8b", "--machine", "v6e-8", "--gpu-memory-utilization", 2), "--gpu-memory-utilization"),
        (("--model", "llama-3.1-8b", "--machine", "v6e-8", "--gpu-memory-utilization", "nan"), "nan is not finite"),
        (("--model", "llama-3.1-8b", "--machine", "v6e-8", "--kv-dtype", "int3"), "--kv-dtype"),
        (("--model", "llama-3.1-8b", "--machine", "v6e-8", "--trace", "/nowhere"), "/nowhere"),
        (("--model", "llama-3.1-8b", "--machine", "v6e-8", "--json", "/nowhere/plan.json"), "no directory /nowhere"),
    ],
)
def test_bad_flags_have_one_line(argv, message):
    assert message in error_of(*argv)


def test_the_example_of_the_docs_is_current(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")
    assert main(["plan", "--model", "llama-3.1-70b", "--machine", "v6e-8", "--max-model-len", "32768"]) == 0
    said = capsys.readouterr().out.rstrip()
    assert f"```\n{said}\n```" in (ROOT / "docs/plan.md").read_text()
