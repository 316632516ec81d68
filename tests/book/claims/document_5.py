# after: predictions
for of_ranks in results.values():
    for _, _, sums in of_ranks:
        assert len(sums["TD"]) == BATCHES * (1 + RUNS)
        assert sums["TD"] == sums["KJT"]
