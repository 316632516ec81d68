# after: patience
assert dist.constants.default_pg_timeout.total_seconds() == 1800
# after: spawn-run
assert codes == [0, 1]
# after: ranks-cell
assert [total for _, total in answers] == [3, 3]
assert len({pid for pid, _ in answers}) == 2
# after: by-hand-check
assert sum(sent[0]) == 3 * 4096 and sum(map(sum, sent)) == 2 * sum(sent[0])
assert traces.bytes_between(4, ["all-to-all"]) == [
    [0 if a == b else 4096 for a in range(4)] for b in range(4)
]
# after: swap
assert before[1][2] == 12 == after[2][1]
# after: lazy
torch.testing.assert_close(total.wait(), torch.ones(3, 2))
# after: break-raises
assert [error.rank for error in failures.values()] == [1, 1, 1]
assert "table 'product' has 0 rows" in str(failures[raises])
assert "SIGKILL" in str(failures[dies])
assert isinstance(failures[stalls], TimeoutError)
assert "all_reduce" in str(failures[stalls]) and "time.sleep(60)" in str(failures[stalls])
# after: hosts
assert [(int(host), int(local)) for host, local in places.values()] == [
    (0, 0),
    (0, 1),
    (1, 0),
    (1, 1),
]
# after: ex3-solution
assert check.all_right("04")
