import pickle
import time

from tutorec.teach.trace import Event, Trace, Turn, fastest, take_turns


def two_ranks():
    first, second = Trace(rank=0), Trace(rank=1)
    first.sent("input_dist", to=1, count=100)
    second.sent("input_dist", to=0, count=40)
    second.sent("output_dist", to=0, count=7)
    return [first, second]


def test_span_measures_its_block_even_when_it_raises():
    trace = Trace()
    try:
        with trace.span("wait"):
            time.sleep(0.002)
            raise RuntimeError("planned")
    except RuntimeError:
        pass
    assert trace.seconds("wait")[0] >= 0.002
    assert len(trace.spans()) == 1


def test_merge_orders_by_time_and_survives_pickling():
    late, early = Event(0, "b", start=2.0, end=3.0), Event(1, "a", start=1.0, end=1.5)
    merged = Trace.merge([Trace(0, [late]), pickle.loads(pickle.dumps(Trace(1, [early])))])
    assert merged.events == [early, late]
    assert merged.seconds("a") == [0.0, 0.5]


def test_bytes_between_adds_up_the_stages_asked_for():
    merged = Trace.merge(two_ranks())
    assert merged.bytes_between(2) == [[0, 100], [47, 0]]
    assert merged.bytes_between(2, ["output_dist"]) == [[0, 0], [7, 0]]


def test_the_fastest_step_is_the_one_whose_last_rank_ends_soonest():
    def trace(rank, start, end):
        return Trace(rank, [Event(rank, "look up", start=start, end=end)])

    quick_but_late = [trace(0, 0.0, 1.0), trace(1, 0.0, 5.0)]
    even = [trace(0, 10.0, 13.0), trace(1, 10.5, 13.5)]
    fastest_step = Trace.fastest(list(zip(quick_but_late, even, strict=True)))
    assert {event.rank for event in fastest_step.events} == {0, 1}
    assert fastest_step.duration() == 3.5


def test_fastest_takes_the_seconds_of_another_timer():
    times = iter([1.0, 4.0, 10.0, 12.0])
    assert fastest(lambda: None, repeat=2, timer=lambda: next(times)) == 2.0


def test_fastest_prepares_each_call_outside_of_its_time():
    seconds = iter([0.0, 3.0, 10.0, 11.0, 20.0, 22.0])
    done = []
    took = fastest(
        lambda: done.append("call"),
        repeat=3,
        before=lambda: done.append("before"),
        timer=lambda: next(seconds),
    )
    assert took == 1.0
    assert done == ["before", "call"] * 3


def test_calls_take_turns_and_the_smallest_of_each_number_is_kept(monkeypatch):
    seconds = iter([0.0, 3.0, 0.0, 1.0, 0.0, 2.0, 0.0, 5.0])
    busy = iter([0.0, 1.0, 0.0, 0.5, 0.0, 2.0, 0.0, 0.25])
    monkeypatch.setattr("tutorec.teach.trace.clock", lambda: next(seconds))
    monkeypatch.setattr("time.process_time", lambda: next(busy))
    done = []
    calls = {"a": lambda: done.append("a"), "b": lambda: done.append("b")}
    took = take_turns(calls, rounds=2, before=lambda: done.append("before"))
    assert took == {"a": Turn(seconds=2.0, busy=1.0), "b": Turn(seconds=1.0, busy=0.25)}
    assert done == ["before", "a", "before", "b"] * 2
