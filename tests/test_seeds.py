from reincarnate import seeds


def test_streams_are_distinct_and_reproducible() -> None:
    derived = {
        seeds.derive(seed, purpose, count)
        for seed in range(20)
        for purpose in ("collect", "online", "learner")
        for count in (0, 1, 1_000)
    }
    assert len(derived) == 180
    assert seeds.derive(3, "online", 7) == seeds.derive(3, "online", 7)
    # room for 2^30 environments before an int32 overflows
    assert max(derived) < 2**30
