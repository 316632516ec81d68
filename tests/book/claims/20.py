# after: stored
from pathlib import Path

import torch

first_losses = {root: lines[-20:] for root, lines in runs["printed"]["train.py"].items()}
second_losses = {root: lines for root, lines in runs["printed"]["restart.py"].items()}
assert first_losses["torchrec"] == first_losses["tutorec"]
assert f"{float(first_losses['torchrec'][0]):.3f}" == "0.688"
assert f"{float(first_losses['torchrec'][-1]):.3f}" == "0.320"
assert f"{float(second_losses['tutorec'][0]):.3f}" == "0.269"
assert f"{float(second_losses['torchrec'][0]):.3f}" == "0.678"
assert second_losses["torchrec"][20:] == second_losses["tutorec"][20:]
assert parity["versions"]["torchrec"] == "1.8.0"
# after: migrate
moved = {name: Path(project, name).read_text() for name in ("shop.py", "parallel.py", "train.py")}
assert not any("torchrec" in text for text in moved.values())
# after: run
assert len(losses) == 20
furthest = max(abs(one - other) for one, other in zip(losses, their_losses, strict=True))
assert furthest < 1e-4, furthest
# after: cases
assert len(training) == 34 and 90 <= len(cases) <= 130
assert sum(case["numbers"] for case in training) // len(training) == 310
assert of_training == {"equal to the bit": 30, "not equal": 4}
assert panels["plain torch"]["training on two ranks"]["equal to the bit"] == 0
by_bits = {name: case for name, case in parity["cases"].items() if case in training}
unequal = {
    name: case["fbgemm"][1] for name, case in by_bits.items() if case["fbgemm"][0] < case["numbers"]
}
assert sorted(unequal) == [
    "column_wise rowwise_adagrad none",
    "row_wise rowwise_adagrad none",
    "row_wise sgd mean",
    "table_wise rowwise_adagrad none",
]
assert all(apart < 2e-7 for name, apart in unequal.items() if "adagrad" in name)
assert f"{unequal['row_wise sgd mean']:.1e}" == "7.2e-07"
assert max(case[backend][1] for case in training for backend in ("fbgemm", "torch")) < 7.5e-7
# after: break
assert abs(again[0] - 0.269) < 2e-3
assert max(abs(a - b) for a, b in zip(again[20:], their_again[20:], strict=True)) < 1e-3
# after: answers
assert len(ours) == 9
for question, both in parity["answers"].items():
    assert both["tutorec"] != both["torchrec"], question
    if "CUDA" not in question or not torch.cuda.is_available():
        assert ours[question] == both["tutorec"], question
# after: costs
medians = {what: row["median"] for what, row in measured.items()}
assert ratios["date"].startswith("2026-11-26")
assert (ratios["hardware"]["cpu"], ratios["hardware"]["cores"]) == ("AMD EPYC", 2)
assert len(measured) == 14
assert sorted({row["rounds"] for row in measured.values()}) == [5, 30]
assert measured["import, first lookup"]["rounds"] == 5
include_one = {what for what, row in measured.items() if row["low"] <= 1 <= row["high"]}
assert include_one == {"training step, unsharded, fused", "training step, row_wise"}
assert f"{medians['training step, table_wise']:.2f}" == "1.11"
assert round(medians["training step, data_parallel"]) == 12
for kind in ("table_wise", "row_wise", "column_wise"):
    assert 1.05 < medians[f"training step, {kind}"] < 1.25
assert 1.25 < medians["training step of a DLRM"] < 1.3
for what in ("split", "permuted", "to_dict"):
    assert 2 < medians[f"a jagged batch, {what}"] < 4
assert round(26 * 30_000 * 64 * 4 / 1e6) == 200
# after: names
used, have, _, _ = map(sum, zip(*parity["names"].values(), strict=True))
assert used == 310 and 0.75 < have / used < 0.85
assert parity["names"]["datasets"][:2] == [22, 22] and parity["names"]["the root"][:2] == [15, 15]
assert 0.68 < parity["names"]["distributed"][1] / parity["names"]["distributed"][0] < 0.78
# after: back
assert {name: Path(project, name).read_text() for name in moved} == {
    name: text.replace("tutorec", "torchrec") for name, text in moved.items()
}
# after: ex-2-solution
assert check.all_right("20")
