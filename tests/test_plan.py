"""`nvgemm-fusion plan`: scripts as people write them, run on a GPU that is not there."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from textwrap import dedent

import pytest
import torch
from typer.testing import CliRunner

COMMAND = Path(sys.executable).parent / "nvgemm-fusion"

HEAD = """
import torch
import torch.nn as nn
import torch.nn.functional as F

def mlp(**options):
    return nn.Sequential(nn.Linear(512, 1024, **options), nn.GELU(), nn.Linear(1024, 512, **options))

"""


@pytest.fixture
def plan(tmp_path, instant_kernels, monkeypatch):
    """A function that runs the command on the text of a script."""
    from nvgemm_fusion.bench.command import app

    monkeypatch.setattr("nvgemm_fusion.bench.terminal.Console.is_terminal", False)

    def run(text, *arguments, options=()):
        script = tmp_path / "script.py"
        script.write_text(HEAD + dedent(text))
        return CliRunner().invoke(app, ["plan", *options, str(script), *arguments])

    yield run
    torch._dynamo.reset()


def planned(plan, text, *arguments, options=()):
    """The decisions on the GEMMs of a script that runs to its end, and what it printed."""
    result = plan(text, *arguments, options=("--json", *options))
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)["decisions"], result.stderr


def sizes(decisions):
    return {tuple(decision["problem"][size] for size in "mnk") for decision in decisions if decision["problem"]}


UP, DOWN = (256, 1024, 512), (256, 512, 1024)

GOOD = {
    "module.cuda": """
        model = mlp().cuda().bfloat16()
        x = torch.randn(256, 512).cuda().bfloat16()
        with torch.no_grad():
            y = torch.compile(model)(x)
        print(y.shape, y.device, y.dtype, x.is_cuda, x.get_device())
        assert (y.shape, str(y.device), y.is_cuda) == ((256, 512), "cuda:0", True)
    """,
    "module.to": """
        model = torch.compile(mlp()).to("cuda", torch.bfloat16)
        x = torch.randn(256, 512).to("cuda", dtype=torch.bfloat16, non_blocking=True)
        with torch.inference_mode():
            assert model(x).argmax(-1).shape == (256,)
    """,
    "an index": """
        model = mlp().to(0).bfloat16()
        torch.compile(model)(torch.ones(256, 512, device="cuda:0").to(torch.bfloat16))
        torch.tensor([1.0]).cuda(0)
    """,
    "factories": """
        import numpy as np
        device = torch.device("cuda:0")
        generator = torch.Generator(device="cuda").manual_seed(0)
        x = torch.randn(256, 512, device=device, dtype=torch.bfloat16, generator=generator)
        x = x + torch.zeros_like(x) + torch.full((512,), 2.0, device="cuda", dtype=torch.bfloat16)
        x = x + torch.tensor(np.ones(512), device="cuda").bfloat16() + torch.as_tensor([1], device=device)
        x = x + torch.from_numpy(np.ones(512)).to(device).bfloat16() + torch.arange(512, device=device)
        torch.compile(mlp(device=device, dtype=torch.bfloat16))(x)
    """,
    "set_default_device": """
        torch.set_default_device("cuda")
        torch.set_default_dtype(torch.bfloat16)
        x = torch.rand(256, 512)
        assert x.is_cuda and torch.tensor([1.0]).is_cuda
        torch.compile(mlp())(x)
        torch.set_default_dtype(torch.float32)
    """,
    "with torch.device": """
        with torch.device("cuda"):
            model, x = mlp(dtype=torch.bfloat16), torch.ones(256, 512, dtype=torch.bfloat16)
            torch.nn.init.trunc_normal_(model[0].weight)
        torch.compile(model, mode="max-autotune")(x)
    """,
    "accelerator": """
        assert torch.accelerator.is_available()
        device = torch.accelerator.current_accelerator()
        torch.compile(mlp(), mode="reduce-overhead").to(device).bfloat16()(torch.ones(256, 512).to(device).bfloat16())
        torch.accelerator.synchronize()
    """,
    "training": """
        torch.manual_seed(0)
        torch.set_float32_matmul_precision("high")
        model = mlp()
        first = model[0].weight
        model = model.to("cuda").bfloat16()
        assert model[0].weight is first
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10)
        step = torch.compile(lambda x, y: F.mse_loss(model(x), y))
        for _ in range(2):
            x = torch.randn(256, 512, device="cuda", dtype=torch.bfloat16)
            loss = step(x, x)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step(); schedule.step(); optimizer.zero_grad(set_to_none=True)
        print("loss", loss.detach(), f"{loss}", str(loss))
    """,
    "autocast": """
        model = nn.Sequential(mlp(), nn.LayerNorm(512), nn.Dropout(0.1)).cuda()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, fused=True)
        compiled = torch.compile(model)
        x = torch.randn(256, 512, device="cuda", requires_grad=True)
        with torch.autocast("cuda", dtype=torch.bfloat16):
            y = compiled(x)
            assert y.dtype == torch.float32 and F.linear(x, x).dtype == torch.bfloat16
        y.sum().backward()
        optimizer.step()
        assert x.grad.shape == x.shape and model[0][0].weight.grad.dtype == torch.float32
        with torch.cuda.amp.autocast(dtype=torch.float16):
            assert model[0](x).dtype == torch.float16
    """,
    "a loader": """
        from torch.utils.data import DataLoader, TensorDataset
        data = TensorDataset(torch.randn(512, 512), torch.arange(512))
        model = torch.compile(mlp().cuda().bfloat16())
        for x, label in DataLoader(data, batch_size=256, shuffle=True, pin_memory=True, num_workers=1):
            assert 0 <= label[0].item() < 512 and len(label.tolist()) == 256
            y = model(x.cuda(non_blocking=True).bfloat16())
            F.cross_entropy(y.float(), label.cuda(non_blocking=True)).backward()
    """,
    "a state": """
        import os, tempfile
        model = mlp()
        with tempfile.TemporaryDirectory() as folder:
            path = os.path.join(folder, "state.pt")
            torch.save({name: torch.zeros(tensor.shape) for name, tensor in model.state_dict().items()}, path)
            model.load_state_dict(torch.load(path))
            model.load_state_dict(torch.load(path, map_location="cpu", weights_only=True))
            model.cuda().load_state_dict(torch.load(path, map_location="cuda"))
        torch.compile(model.bfloat16())(torch.ones(256, 512, device="cuda", dtype=torch.bfloat16))
    """,
    "the clock and the memory": """
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda.manual_seed_all(0); torch.cuda.reset_peak_memory_stats(); torch.cuda.empty_cache()
        model = torch.compile(mlp().cuda().bfloat16())
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            start.record()
            model(torch.ones(256, 512, device="cuda", dtype=torch.bfloat16)).record_stream(stream)
            end.record()
        torch.cuda.synchronize()
        assert start.elapsed_time(end) > 0 and torch.cuda.max_memory_allocated() == 0
        assert torch.cuda.is_available() and torch.cuda.device_count() == 1 and torch.cuda.is_bf16_supported()
        assert torch.cuda.get_device_properties(0).total_memory > 2**36, torch.cuda.get_device_capability()
    """,
    "settings of its own": """
        import torch._inductor.config as config
        config.max_autotune_gemm = False
        config.nvgemm_epilogue_fusion = False
        config.nvgemm_fusion_log = "/nowhere/decisions.jsonl"
        torch.compile(mlp().cuda().bfloat16(), options={"max_autotune": False, "nvgemm_fusion_cache": True})(
            torch.ones(256, 512, device="cuda", dtype=torch.bfloat16))
        config.max_autotune_gemm, config.nvgemm_epilogue_fusion, config.nvgemm_fusion_log = False, False, None
    """,
    "kernels and optimizers of its own": """
        import triton
        import triton.language as tl

        @triton.jit
        def double(x, y, n, BLOCK: tl.constexpr):
            at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
            tl.store(y + at, tl.load(x + at, at < n) * 2, at < n)

        model = mlp().cuda().bfloat16()
        optimizer = torch.optim.AdamW(model.parameters(), capturable=True)

        @torch.compile
        def forward(x):
            y = torch.empty_like(x)
            double[(triton.cdiv(x.numel(), 128),)](x, y, x.numel(), BLOCK=128)
            return F.cross_entropy(model(y).float(), torch.zeros(256, dtype=torch.long, device="cuda"))

        x = torch.ones(256, 512, device="cuda", dtype=torch.bfloat16)
        double[(1024,)](x, torch.empty_like(x), x.numel(), BLOCK=128)
        forward(x).backward()
        torch.compile(optimizer.step)()
    """,
    "checkpoints and moves": """
        from torch.utils.checkpoint import checkpoint
        model = mlp().cuda().bfloat16()

        @torch.compile
        def step(x):
            return checkpoint(model, x.to("cuda").to(torch.bfloat16), use_reentrant=False).sum().cuda()

        step(torch.ones(256, 512)).backward()
        assert model[0].weight.grad.shape == (1024, 512)
    """,
}


@pytest.mark.parametrize("name", GOOD)
def test_a_script_as_it_is(plan, name):
    decisions, printed = planned(plan, GOOD[name])
    assert {UP, DOWN} <= sizes(decisions), decisions
    assert all(decision["target"] == "H200" for decision in decisions if decision["problem"])
    statuses = {alternative["status"] for decision in decisions for alternative in decision["alternatives"]}
    assert "modelled" in statuses and "measured" not in statuses
    if name == "module.cuda":
        assert "torch.Size([256, 512]) cuda:0 torch.bfloat16 True 0" in printed


def test_attention_is_one_kernel(plan):
    """Not two products and a softmax; also with heads in groups, a mask, and without autograd."""
    decisions, _ = planned(
        plan,
        """
        model = nn.Linear(512, 512).cuda().bfloat16()
        mask = torch.ones(1, 1, 256, 256, dtype=torch.bool, device="cuda")

        @torch.compile
        def attend(x, mask=None, key_heads=8):
            q = model(x).view(1, 256, 8, 64).transpose(1, 2)
            k = q[:, :key_heads]
            y = F.scaled_dot_product_attention(q, k, k, mask, is_causal=mask is None, enable_gqa=key_heads < 8)
            return y.transpose(1, 2).reshape(1, 256, 512)

        x = torch.randn(1, 256, 512, device="cuda", dtype=torch.bfloat16)
        attend(x).sum().backward()
        attend(x, mask).sum().backward()
        with torch.inference_mode():
            assert attend(x, None, 2).shape == (1, 256, 512)
        """,
    )
    operators = {operator for decision in decisions for node in decision["nodes"] for operator in node["operators"]}
    assert (256, 512, 512) in sizes(decisions) and not operators & {"bmm", "baddbmm", "_softmax"}, operators


@pytest.mark.skipif(not importlib.util.find_spec("transformers"), reason="needs the extra `bench`")
def test_a_model_of_transformers(plan):
    decisions, _ = planned(
        plan,
        """
        from transformers import LlamaConfig, LlamaForCausalLM
        config = LlamaConfig(hidden_size=256, intermediate_size=512, num_hidden_layers=1, num_attention_heads=4,
                             num_key_value_heads=2, vocab_size=1000, tie_word_embeddings=True)
        model = LlamaForCausalLM(config).to("cuda", torch.bfloat16)
        assert model.lm_head.weight is model.model.embed_tokens.weight
        ids = torch.randint(0, 1000, (2, 128), device="cuda")
        loss = torch.compile(model)(ids, labels=ids).loss
        loss.backward()
        print(loss.shape)
        """,
    )
    assert {(256, 512, 256), (256, 256, 512)} <= sizes(decisions)


def test_odd_sizes_are_not_timed(plan):
    """Whether a GEMM is padded is measured on a GPU, and here it is not."""
    decisions, _ = planned(
        plan,
        """
        x = torch.randn(256, 512, device="cuda", dtype=torch.bfloat16)
        torch.compile(nn.Linear(512, 1001).cuda().bfloat16())(x)
        """,
    )
    assert decisions[0]["problem"] is None or decisions[0]["problem"]["n"] == 1001


ONE_GEMM = """
torch.compile(nn.Linear(512, 1024).cuda().bfloat16())(torch.ones(256, 512, device="cuda", dtype=torch.bfloat16))
"""


@pytest.mark.parametrize("target", ["H100", "H200", "B200", "RTX 5090", "A100"])
def test_every_target(plan, target):
    script = "\n".join(["print(torch.cuda.get_device_name())", *ONE_GEMM.splitlines()])
    result = plan(script, options=("--target", target))
    assert result.exit_code == 0, result.output
    assert f"NVIDIA {target}" in result.stdout and f"1 GEMM on a virtual {target}" in result.stdout
    if target == "A100":
        assert "nothing fused" in result.stdout and "target" in result.stdout
    else:
        assert "modelled" in result.stdout.splitlines()[-1]


def test_the_script_gets_its_arguments_and_its_neighbours(plan, tmp_path):
    (tmp_path / "beside_the_script.py").write_text("ROWS = 128\n")
    script = f"""
    import sys
    from beside_the_script import ROWS
    print(sys.argv[1:], sys.argv[0] == __file__, sys.modules["__main__"].ROWS, __name__)
    {ONE_GEMM.strip()}
    """
    _, printed = planned(plan, script, "--json", "-x", "--", "--target", "A100")
    assert "['--json', '-x', '--', '--target', 'A100'] True 128 __main__" in printed
    assert sys.modules["__main__"].__name__ == "__main__" and str(tmp_path) not in sys.path


def test_the_decisions_can_be_kept(plan, tmp_path):
    kept = tmp_path / "kept.jsonl"
    kept.write_text("what stood there before\n")
    assert plan(ONE_GEMM, options=("--log", str(kept))).exit_code == 0
    assert [json.loads(line)["target"] for line in kept.read_text().splitlines()] == ["H200"]
    result = plan(ONE_GEMM, options=("--log", str(tmp_path / "no folder" / "kept.jsonl")))
    assert result.exit_code == 2 and "cannot write" in result.stderr


READS = {
    "loss.item()": "loss = x.sum()\nloss.item()",
    "float(x.sum())": "float(x.sum())",
    "x.tolist()": "x.tolist()",
    "if x.sum() > 0:": "if x.sum() > 0:\n    pass",
    "x.cpu().numpy()": "x.cpu().numpy()",
    "np.array(x)": "import numpy as np\nnp.array(x)",
    "x[x > 0]": "x[x > 0]",
    "x.nonzero()": "x.nonzero()",
    "print(f'{x.sum():.3f}')": "print(f'{x.sum():.3f}')",
    "totals[0] = x.sum()": "totals = torch.zeros(4)\ntotals[0] = x.sum()",
    "torch.add(x.cpu(), 1, out=totals)": "totals = torch.zeros(4, 4)\ntorch.add(x.cpu(), 1, out=totals)",
    "torch.save(x, kept)": "torch.save(x, kept)",
    "return x.sum().item()": "@torch.compile\ndef f(x):\n    return x.sum().item()\nf(x)",
    "assert torch.equal(x, x)": "assert torch.equal(x, x)",
}


@pytest.mark.parametrize("line", READS)
def test_a_value_that_is_read_is_named(plan, tmp_path, line):
    kept = tmp_path / "kept.pt"
    kept.write_text("a checkpoint")
    result = plan(f"kept = {str(kept)!r}\nx = torch.ones(4, 4, device='cuda')\n{READS[line]}\n")
    assert result.exit_code == 2, result.output
    said = result.stderr.splitlines()[-1]
    number = next(n for n, text in enumerate((tmp_path / "script.py").read_text().splitlines(), 1) if line in text)
    assert f"script.py:{number}: `{line}`" in said and "values" in said and "virtual GPU" in said
    assert "Traceback" not in result.stderr and kept.read_text() == "a checkpoint"


def test_a_script_that_fails(plan):
    result = plan("def f(x):\n    return x @ x\n\nf(torch.ones(2, 3, device='cuda'))\n")
    assert result.exit_code == 1 and result.stderr.splitlines()[-1].endswith("your frames")
    assert "in f" in result.stderr and "return x @ x" in result.stderr and "script.py" in result.stderr
    assert "plan_command" not in result.stderr and "site-packages" not in result.stderr
    result = plan("import no_such_package")
    assert result.exit_code == 1 and "ModuleNotFoundError" in result.stderr


@pytest.mark.parametrize(("ending", "code"), [("sys.exit()", 0), ("sys.exit(3)", 3), ("sys.exit('enough')", 1)])
def test_a_script_that_ends_itself(plan, ending, code):
    result = plan(f"import sys\n{ONE_GEMM}\n{ending}\nprint('never')")
    assert result.exit_code == code and "1 GEMM on" in result.stdout and "never" not in result.stdout
    assert ("enough" in result.stderr) == (code == 1)


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("print('hello')", "compiles nothing"),
        ("torch.compile(mlp())", "compiles nothing"),
        ("torch.compile(mlp())(torch.ones(2, 512))", "lies on the CPU"),
        ("torch.compile(lambda x: x + 1)(torch.ones(2, device='cuda'))", "nothing to decide"),
    ],
)
def test_nothing_to_plan(plan, text, sentence):
    result = plan(text)
    assert result.exit_code == 0 and sentence in result.stdout.splitlines()[-1]
    decisions, _ = planned(plan, text)
    assert decisions == []


@pytest.mark.parametrize("content", [b"def f(:\n", b"\x00\x01", b"x = '\xff'\n"])
def test_no_script(tmp_path, content):
    from nvgemm_fusion.bench.command import app

    path = tmp_path / "script.py"
    path.write_bytes(content)
    for arguments in (["plan", str(path)], ["plan", str(tmp_path / "nothing.py")], ["plan", str(tmp_path)]):
        result = CliRunner().invoke(app, arguments)
        assert result.exit_code == 2 and len(result.stderr.splitlines()) == 1, result.output
        assert str(tmp_path) in result.stderr and result.stdout == ""


def test_wrong_use(plan):
    result = plan(ONE_GEMM, options=("--target", "V100"))
    assert result.exit_code == 2 and result.stderr.count("\n") == 1 and "RTX 5090" in result.stderr
    assert plan(ONE_GEMM, options=("--sideways",)).exit_code == 2


def test_nothing_is_left_behind(plan):
    before = torch.tensor, torch.cuda.is_available, torch.Tensor.to, torch.nn.Module.to
    plan(ONE_GEMM + "torch.set_default_device('cuda')\nx.item()")
    assert (torch.tensor, torch.cuda.is_available, torch.Tensor.to, torch.nn.Module.to) == before
    assert type(torch.ones(2)) is torch.Tensor and torch.compile(lambda x: x + 1, backend="eager")(torch.ones(1))
    q = torch.ones(1, 1, 2, 8, requires_grad=True)
    torch.nn.functional.scaled_dot_product_attention(q, q, q).sum().backward()


def test_from_the_shell(tmp_path):
    """With kernels that are really compiled, and whatever the script prints kept out of the JSON."""
    script = tmp_path / "script.py"
    text = "import os, torch.nn as nn, torch\nprint('printed')\nos.system('echo by another process')\n"
    script.write_text(text + ONE_GEMM.replace("nn.Linear(512, 1024)", "nn.Sequential(nn.Linear(512, 1024), nn.ReLU())"))
    result = subprocess.run([COMMAND, "plan", "--json", script], capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stderr
    (decision,) = json.loads(result.stdout)["decisions"]
    assert any(alternative["fused"] for alternative in decision["alternatives"])
    assert "printed" in result.stderr and "by another process" in result.stderr
