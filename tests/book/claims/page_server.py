# after: publish
for name in ("yesterday", "today"):
    frozen = scripting.load_scripted(f"{folder}/{name}.pt")
    assert not any(weight.requires_grad for weight in frozen.parameters())
# after: scorer


def settings():
    return torch.is_inference_mode_enabled(), torch.get_num_threads()


with torch.inference_mode(), ThreadPoolExecutor(1) as pool:
    assert settings() == (True, 1)
    assert pool.submit(settings).result() == (False, 1)
# after: bad
said = {name: [status, *answer.values()] for name, (status, answer) in rows.items()}
assert said.pop("right") == [200, score(her)]
assert said.pop("too large")[0] == 413
assert {status for status, _ in said.values()} == {400}
assert "'item', sample 0, holds id 200" in said["id outside its table"][1]
assert "'clicked', sample 0, is [58, 1.5]" in said["id not whole"][1]
assert "'item'" in said["feature missing"][1]
assert "'clicked': 2" in said["lists of different lengths"][1]
assert "'dense', sample 0" in said["dense not a number"][1]

hostile = {
    "an empty body": "",
    "not an object": "[]",
    "no visitor": json.dumps({key: [] for key in NAMES}),
    "nested too deeply": "[" * 60_000,
    "NaN": json.dumps(her | {"dense": [[0, 0, 0, float("nan")]]}),
    "a number for a row": json.dumps(her | {"dense": [5]}),
    "an integer that float32 does not hold": json.dumps(her | {"dense": [[0, 0, 0, 10**400]]}),
    "a bool": json.dumps(her | {"user": [[True]]}),
    "a list of lists": json.dumps(her | {"user": [[[5]]]}),
    "a number for a list": json.dumps(her | {"user": [5]}),
    "a text": json.dumps(her | {"user": "5"}),
    "a negative id": json.dumps(her | {"user": [[-1]]}),
    "an id that int64 does not hold": json.dumps(her | {"user": [[2**70]]}),
    "not UTF-8": b"\xff\xfe{",
}
with Server(score) as server:
    client = HTTPConnection(*server.server_address, timeout=30)
    idle = HTTPConnection(*server.server_address, timeout=30)
    idle.connect()
    for name, body in hostile.items():
        assert ask(client, body)[0] == 400, name
    for size in ("-1", "x", "100000", "9" * 5_000):
        assert ask(client, **{"Content-Length": size})[0] == 413, size
    chunked = HTTPConnection(*server.server_address, timeout=30)
    chunked.request("POST", "/score", iter([b"{}"]), encode_chunked=True)
    assert chunked.getresponse().status == 413
    halved = socket.create_connection(server.server_address, timeout=30)
    halved.sendall(b"POST / HTTP/1.1\r\nContent-Length: 99\r\n\r\n{")
    halved.shutdown(socket.SHUT_WR)  # 98 bytes never come
    assert b" 400 " in halved.recv(1000)
    assert ask(client, json.dumps(her)) == (200, {"scores": score(her)})
assert set(threading.enumerate()) <= before
assert server.socket.fileno() == -1  # closed
for one in (client, idle, chunked, halved):
    one.close()
# after: load-run
assert len(answers) == 10 * len(requests) and len(right) == len(requests)
# What a client waits, added up, is at most the time that it runs.
for rate, bound, mean, p50, p99 in (of_one, of_four):
    assert rate > 0 and mean <= 1.001 * bound and p50 <= p99
# after: swap
# The visitor who triggers it meets today's model, and this client's first yesterday's.
assert which.count(0) >= 1 and which.count(1) >= 1
assert which.count(0) + which.count(1) == len(requests)
# after: joiner
wrong_one = her | {"item": [[200]]}


class Kept:
    """A pool that starts nothing."""

    def submit(self, work):
        return None


joiner = Joiner(score, Kept())
calls = []
joiner.score = lambda request: calls.append(len(request["user"])) or score(request)
futures = [Future() for _ in range(18)]
joiner.waiting = [(one, future) for one, future in zip(requests, futures, strict=False)]
joiner.work()
assert calls == [16] and len(joiner.waiting) == 2
joiner.work()
joiner.work()  # nobody waits
assert calls == [16, 2] and not joiner.waiting
got = [future.result(timeout=0) for future in futures]
torch.testing.assert_close(
    torch.tensor(got), torch.tensor([score(one) for one in requests[: len(got)]])
)

# A wrong request beside a right one: neither is answered by the call, and each alone.
joiner.waiting = [(her, Future()), (wrong_one, Future())]
pair = [future for _, future in joiner.waiting]
joiner.work()
assert [future.result(timeout=0) for future in pair] == [[], []]
mixed = [json.dumps(wrong_one if i % 3 == 0 else her) for i in range(48)]
with ThreadPoolExecutor(1) as pool, Server(Joiner(score, pool)) as server:
    found = load(server, mixed, 16)[0]
assert [status for status, _ in found] == [400 if i % 3 == 0 else 200 for i in range(48)]
assert all("sample 0, holds id 200" in answer["error"] for _, answer in found[::3])
two = {name: [*her[name], *requests[0][name]] for name in NAMES}
with ThreadPoolExecutor(1) as pool, Server(Joiner(score, pool)) as server:
    [(status, answer)] = load(server, [json.dumps(two)], 1)[0]
assert (status, answer["scores"]) == (200, score(two))
# after: ex-1-solution
assert check.all_right("server")
