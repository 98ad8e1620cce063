"""Which versions of a bucket count, and which go."""

import random
from dataclasses import replace

import pytest

from torch_ros.bucket import chain
from torch_ros.bucket.files import InBucket, kept
from torch_ros.errors import UsageError, VersionNotFound


def row(version, born_ms, uid=None, run="r", number=1):
    return InBucket(number, run, version, born_ms, uid or f"u{version}", "0a1b")


def numbers(there):
    return [each.version for each in chain.living(there)]


def test_the_newest_come_first_whatever_the_order_of_the_list():
    there = [row(n, 1000 + n) for n in range(7)]
    random.Random(1).shuffle(there)
    assert numbers(there) == [6, 5, 4, 3, 2, 1, 0]
    assert numbers([]) == []


def test_a_lineage_that_has_ended_does_not_shadow_the_one_that_lives():
    dead = [row(n, 1000 + n, f"z-old-{n}") for n in (98, 99, 100, 101)]
    living = row(99, 5000, "a-new")
    there = [*dead, living]
    assert numbers(there) == [99, 98]
    assert chain.living(there)[0].uid == "a-new"
    assert numbers([*there, row(102, 5003)]) == [102, 99, 98]


def test_two_archivers_of_one_content_make_one_version():
    assert numbers([row(7, 1000), row(7, 1001), row(8, 1002)]) == [8, 7]


def test_only_the_newest_run_counts():
    there = [row(9, 5000, run="a", number=1), row(2, 1000, run="b", number=2)]
    assert numbers(there) == [2]


def test_what_is_asked_for_is_found_or_it_says_what_there_is():
    there = [row(n, 1000 + n) for n in (3, 5, 8)]
    found = [chain.chosen(there, "m", asked)[-1].version for asked in ("latest", "latest-2", 5)]
    assert found == [8, 3, 5]
    for asked in (4, "latest-3"):
        with pytest.raises(VersionNotFound, match="the bucket has 8, 5, 3"):
            chain.chosen(there, "m", asked)
    with pytest.raises(VersionNotFound, match="the bucket has nothing"):
        chain.chosen([], "m", "latest")
    for asked in (True, "newest", None, 1.5, "latest-"):
        with pytest.raises(UsageError, match="expected a number"):
            chain.chosen(there, "m", asked)


def test_a_number_with_another_content_ends_the_old_one_whatever_the_clocks_say():
    there = [row(n, 9000 + n, f"old-{n}") for n in (98, 99, 100)]
    born_ms = chain.born_ms(there, "r", 99, "new", 50)  # a clock that is far behind
    assert numbers([*there, row(99, born_ms, "new")]) == [99, 98]


def test_a_clock_that_went_back_does_not_hide_a_higher_number():
    there = [row(41, 1000)]
    born_ms = chain.born_ms(there, "r", 42, "u42", 990)
    assert numbers([*there, row(42, born_ms)]) == [42, 41]
    assert chain.born_ms([], "r", 42, "u42", 990) == 990
    assert chain.born_ms([row(41, 1000, run="other")], "r", 42, "u42", 990) == 990


def test_runs_of_an_etcd_that_was_wiped_come_after_those_it_does_not_know():
    there = [row(5, 1, run="old", number=7)]
    assert chain.run_number(there, "new", {"new": 1}) == 8
    assert chain.run_number(there, "old", {"old": 7, "new": 8}) == 7
    assert chain.run_number(there, "new", {"old": 7, "new": 8}) == 8
    there.append(row(1, 2, run="new", number=8))
    assert chain.run_number(there, "new", {"new": 1}) == 8
    assert chain.run_number(there, "newer", {"new": 1, "newer": 2}) == 9


def test_a_new_run_is_the_newest_also_where_somebody_has_deleted_an_old_one():
    there = [row(1, 2, run="new", number=8)]  # it came after a run 7, which is gone
    assert chain.run_number(there, "newer", {"new": 1, "newer": 2}) == 9
    assert chain.run_number([], "first", {"first": 1}) == 1


def test_two_runs_of_one_number_are_two():
    there = [row(3, 1, run="a"), row(2, 2, run="b")]
    assert numbers(there) == [2]
    assert [each.run for each in chain.to_collect(there, 1, {"a", "b"})] == ["a"]


def test_an_older_version_than_those_that_stay_goes_at_once():
    there = [row(8, 1008)]
    assert chain.to_collect([*there, row(7, 1007)], 1, {"r"}) == [row(7, 1007)]
    assert chain.to_collect([*there, row(7, 1007)], 2, {"r"}) == []


def test_the_newest_are_kept_and_runs_that_etcd_does_not_know():
    there = [row(n, 1000 + n) for n in range(6)]
    foreign = row(50, 1, run="foreign", number=0)
    gone = chain.to_collect([*there, foreign], 2, {"r"})
    assert sorted(each.version for each in gone) == [0, 1, 2, 3]
    assert chain.to_collect([*there, foreign], 2, set()) == []
    older = [row(n, 10 + n, run="q", number=0) for n in range(3)]
    gone = chain.to_collect([*older, *there[:2]], 3, {"r", "q"})
    assert [(each.run, each.version) for each in gone] == [("q", 0), ("q", 1)]


def test_what_has_ended_goes_when_its_number_comes_again():
    dead = [row(n, 1000 + n, f"old-{n}") for n in (99, 100, 101)]
    living = [row(99, 5000, "new")]
    assert [e.uid for e in chain.to_collect([*dead, *living], 5, {"r"})] == ["old-99"]
    living += [row(n, 5000 + n) for n in (100, 101)]
    gone = chain.to_collect([*dead, *living], 5, {"r"})
    assert {e.uid for e in gone} == {"old-99", "old-100", "old-101"}


def test_whatever_is_collected_the_newest_stay():
    rng = random.Random(7)
    for _ in range(2000):
        there, clock, runs = [], 0, rng.randint(1, 3)
        for run in range(runs):
            version = rng.randint(0, 3)
            for _ in range(rng.randint(1, 6)):
                clock += rng.randint(0, 2)
                there.append(row(version, clock, f"u{clock}.{len(there)}", f"r{run}", run))
                version = max(0, version + rng.choice([1, 1, 1, -2]))
        keep = rng.randint(1, 4)
        before = chain.living(there)
        gone = chain.to_collect(there, keep, {f"r{run}" for run in range(runs)})
        left = [each for each in there if each not in gone]
        assert chain.living(left)[:keep] == before[:keep]


@pytest.mark.parametrize("run", ["r", "a-b", "a/b%c", "ä"])
def test_a_key_tells_the_version(run):
    one = InBucket(12, run, 7, 1_700_000_000_000, "0a-b/c.d", "0a1b")
    assert kept(one.key) == one
    assert kept(one.key + "x") is None
    assert kept(one.files_at + "/model.safetensors") is None
    assert kept(one.key.replace("versions", "data")) is None
    assert InBucket(2, "r", 10, 1, "u", "0").key < InBucket(10, "r", 9, 0, "u", "0").key


def test_a_name_that_no_archiver_writes_is_no_version():
    key = row(7, 1000).key
    assert kept(key) == row(7, 1000)
    other = ("1-r/versions/" + key.split("/")[2], key.replace(f"{7:020d}", "9" * 20))
    other += (key.replace("-u7-", "-%ff-"), key.replace("0a1b", "0A1B"))
    assert [kept(each) for each in other] == [None] * 4


def test_a_bucket_is_behind_by_numbers_and_by_time_between_publications():
    newest = row(7, 1000)
    assert chain.behind(newest, "r", 7, 1000, 99_000) == (0, 0)
    assert chain.behind(newest, "r", 9, 3500, 99_000) == (2, 2.5)
    assert chain.behind(newest, "r", 7, 3500, 99_000) == (0, 2.5)  # it was published anew
    assert chain.behind(row(9, 5000), "r", 7, 1000, 99_000) == (0, 0)
    for other in (None, row(7, 1000, run="q")):
        assert chain.behind(other, "r", 2, 90_000, 99_000) == (3, 9)
        assert chain.behind(other, "r", 2, 90_000, 80_000) == (3, 0)  # this clock is behind


def delta(version, base, nonce="0a1b", base_nonce="0a1b", **more):
    made = row(version, 1000 + version, **more)
    return replace(made, nonce=nonce, base=(base, base_nonce))


def test_what_a_version_needs_begins_with_a_full_one():
    there = [row(1, 1001), delta(2, 1), delta(5, 2), delta(6, 1)]
    assert [[e.version for e in chain.needed(there, of)] for of in there] == [
        [1],
        [1, 2],
        [1, 2, 5],
        [1, 6],
    ]


@pytest.mark.parametrize(
    ("there", "missing"),
    [
        ([row(1, 1001), delta(3, 2)], 2),
        ([delta(3, 2), delta(2, 3)], 3),
        ([delta(3, 3)], 3),
        ([row(1, 1001), delta(3, 1, base_nonce="0b2c")], 1),
        ([row(1, 1001, run="another"), delta(3, 1)], 1),
        ([row(1, 1001, number=2), delta(3, 1)], 1),
    ],
    ids=["a gap", "a circle", "itself", "another attempt", "another run", "a run of that name"],
)
def test_a_chain_that_is_not_whole_names_what_is_missing(there, missing):
    [of] = [each for each in there if each.version == 3]
    assert chain.needed(there, of) == missing
    with pytest.raises(VersionNotFound):
        chain.chosen(there if of in chain.living(there) else [of], "m", 3)


def test_a_chain_is_at_most_so_long():
    there = [row(0, 1000), *(delta(n, n - 1) for n in range(1, 70))]
    assert len(chain.needed(there, there[chain.READ_MAX])) == chain.READ_MAX + 1
    assert isinstance(chain.needed(there, there[chain.READ_MAX + 1]), int)
    assert chain.chosen(there, "m", "latest")[-1].version == chain.READ_MAX


def test_deltas_are_few_and_small_or_a_version_is_full():
    assert chain.is_short([10], 20, 1)
    assert chain.is_short([5, 5], 20, 2)
    assert not chain.is_short([5, 5], 20, 1)
    assert not chain.is_short([5, 6], 20, 2)
