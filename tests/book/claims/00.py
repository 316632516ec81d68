# after: pairs-reveal
import ast
import importlib.util
import platform

spec = importlib.util.find_spec("fbgemm_gpu")
if spec is not None and spec.origin:
    with open(spec.origin) as source:
        tables = [
            ast.literal_eval(node.value)
            for node in ast.parse(source.read()).body
            if isinstance(node, ast.Assign)
            and ast.unparse(node.targets[0]) == "_fbgemm_torch_compat_table"
        ]
    for known in tables:
        assert known.get("0.4", "2.0") == "2.0" and known.get("0.8", "2.4") == "2.4"
        assert all(known.get(f"1.{x}", f"2.{x + 5}") == f"2.{x + 5}" for x in range(9))
# after: machines
assert [c.name == "fbgemm" for c in choices.values()] == [True, False, False, False, True]
assert "overwrite" in choices["both wheels, to be safe"].reason
# after: gpu-machines
if (platform.system(), platform.machine()) == ("Linux", "x86_64"):
    assert [choice.remedy for choice in GPU_MACHINES.values()] == [
        'pip install "fbgemm-gpu==1.8.*"',
        'pip install "fbgemm-gpu-cpu==1.8.*"',
        'pip install "fbgemm-gpu==1.5.*"',
    ]
# after: break-cell
assert all(word in message for word in ("4096", "product", "product_table"))
# after: colours
assert len(set(clicked.values())) > 1
# after: ex2-solution
assert check.all_right("00")
