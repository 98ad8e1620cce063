"""`torch-ros verify`: one bit that is not what others have is found, and whose it is."""

import argparse
import json
import random

import pytest
import torch
from safetensors.torch import save_file

from torch_ros.checkpoints.compared import Deviation, deviations, digests_of
from torch_ros.cli import main, verifying
from torch_ros.errors import VersionNotFound

DTYPES = (torch.float32, torch.bfloat16, torch.uint8, torch.float64)


def tensors():
    torch.manual_seed(1)
    found = {
        f"layer.{number}": torch.randn(number + 1, 33).to(dtype)
        for number, dtype in enumerate(DTYPES)
    }
    return found | {"scalar": torch.tensor(2.5), "empty": torch.empty(0, 4)}


@pytest.fixture
def three(opened):
    """A trainer and two rollouts that have its version."""
    trainer, *rollouts = (opened(name) for name in ("trainer", "r0", "r1"))
    held = {"trainer": tensors()}
    trainer.register(held["trainer"])
    trainer.publish(7)
    for rollout in rollouts:
        held[rollout.replica] = {name: torch.zeros_like(t) for name, t in tensors().items()}
        rollout.register(held[rollout.replica])
        rollout.replicate()
    return trainer, held


@pytest.fixture
def asked(endpoint, capsys):
    def ask(*arguments):
        code = main.main(["--endpoint", endpoint, "--json", *map(str, arguments)])
        out, err = capsys.readouterr()
        return code, json.loads(out) if out else None, err

    return ask


def flip(tensor, bit):
    raw = tensor.view(-1).view(torch.uint8)
    raw[bit // 8] ^= 1 << bit % 8


def arguments(endpoint, model, **more):
    given = {"number": "7", "against": None, "replica": None, "full": True, "timeout": 20.0}
    return argparse.Namespace(endpoint=endpoint, model=model, **given | more)


@pytest.mark.long
@pytest.mark.parametrize("endpoint", ["memory"], indirect=True)
def test_one_flipped_bit_is_found_in_100_of_100(three, endpoint):
    trainer, held = three
    chance, asked = random.Random(3), arguments(endpoint, trainer.model)
    assert verifying.verify(asked).is_same
    names = [name for name, tensor in tensors().items() if tensor.numel()]
    for _ in range(100):
        replica, name = chance.choice(list(held)), chance.choice(names)
        tensor = held[replica][name]
        bit = chance.randrange(8 * tensor.nbytes)
        flip(tensor, bit)
        [found] = verifying.verify(asked).deviations
        flip(tensor, bit)
        assert (found.name, found.replica) == (name, replica)


@pytest.mark.long
def test_the_tensor_and_the_replica_are_named(three, asked):
    trainer, held = three
    code, said, err = asked("verify", trainer.model, "latest", "--full")
    assert (code, err, said["schema"], said["deviations"]) == (0, "", 1, [])
    assert (said["read_count"], said["tensor_count"], len(said["replicas"])) == (6, 6, 3)
    flip(held["r1"]["layer.2"], 100)
    code, said, _ = asked("verify", trainer.model, 7, "--full")
    [found] = said["deviations"]
    assert code == 1
    assert (found["name"], found["replica"]) == ("layer.2", "r1")
    assert set(found["others"]) == {"trainer", "r0"}
    assert asked("verify", trainer.model, 7, "--full", "--replica", "r0")[0] == 0
    code, said, _ = asked("verify", trainer.model, 7, "--full", "--replica", "r1")
    assert (code, said["deviations"][0]["replica"]) == (1, "r1")
    code, said, _ = asked("verify", trainer.model, 7)
    assert said["read_count"] == 1


def test_a_checkpoint_on_disk_is_right(three, asked, tmp_path):
    trainer, held = three
    save_file(tensors(), tmp_path / "model.safetensors")
    check = ("verify", trainer.model, 7, "--full", "--against", tmp_path)
    assert asked(*check)[0] == 0
    for replica in held:  # so that most are wrong
        flip(held[replica]["scalar"], 3)
    code, said, _ = asked(*check)
    assert code == 1
    assert {each["replica"] for each in said["deviations"]} == set(held)
    other = {name: t for name, t in tensors().items() if name != "empty"} | {"w": torch.zeros(2)}
    save_file(other, tmp_path / "model.safetensors")
    code, said, _ = asked(*check, "--replica", "r0")
    assert (code, {each["name"] for each in said["unlike"]}) == (1, {"empty", "w"})
    assert {each["replica"] for each in said["deviations"]} == {"r0"}


def test_nothing_to_compare_with_is_a_line(opened, asked):
    trainer = opened("trainer", {"w": torch.zeros(4)})
    trainer.publish(7)
    code, _, err = asked("verify", trainer.model, 7)
    assert (code, "only trainer holds version 7" in err) == (2, True)
    code, _, err = asked("verify", trainer.model, 7, "--replica", "r9")
    assert (code, "replica 'r9' does not hold version 7" in err) == (2, True)


@pytest.mark.parametrize("endpoint", ["memory"], indirect=True)
def test_what_was_published_is_right_where_that_is_known(opened, asked):
    trainer, rollout = opened("trainer", digests="full"), opened("rollout")
    mine, its = tensors(), {name: torch.zeros_like(each) for name, each in tensors().items()}
    trainer.register(mine)
    trainer.publish(7)
    code, found, _ = asked("verify", trainer.model, "7", "--full")
    assert (code, found["against"], found["replicas"]) == (0, "digests", ["trainer"])
    rollout.register(its)
    rollout.replicate()
    for each in (mine, its):  # both have the same, and not what was published
        flip(each["layer.1"], 77)
    code, found, _ = asked("verify", trainer.model, "7", "--full")
    assert (code, found["replicas"]) == (1, ["trainer", "rollout"])
    assert found["deviations"] == [
        {"name": "layer.1", "replica": name, "others": [verifying.PUBLISHED]}
        for name in ("trainer", "rollout")
    ]


def test_a_stream_from_one_replica_reads_nobody_else(opened, three):
    _, held = three
    flip(held["r1"]["scalar"], 0)
    reader = opened("reader")
    for source, wanted in held.items():
        with reader.stream(7, ["scalar"], buffer_bytes=1 << 10, source=source) as stream:
            assert torch.equal(next(stream)[1], wanted["scalar"])
            assert (stream.bytes_read, stream.read_s > 0) == (4, True)
    with pytest.raises(VersionNotFound, match="replica 'r9' does not hold it whole"):
        next(reader.stream(7, ["scalar"], buffer_bytes=1 << 10, source="r9"))


def test_most_are_right_and_in_doubt_the_first():
    assert list(deviations({"a": {"w": 1}, "b": {"w": 1}})) == []
    assert list(deviations({"a": {"w": 1}, "b": {"w": 2}})) == [Deviation("w", "b", ("a",))]
    found = {"a": {"w": 1}, "b": {"w": 2}, "c": {"w": 2}}
    assert list(deviations(found)) == [Deviation("w", "a", ("b", "c"))]
    assert [each.replica for each in deviations(found, ["a"])] == ["b", "c"]
    assert list(deviations({"disk": {}, "a": {"w": 1}}, ["disk"])) == []


def test_a_nan_is_what_it_is():
    nans = [("w", torch.tensor([bits], dtype=torch.int32).view(torch.float32)) for bits in (
        0x7FC00000, 0x7FC00001)]  # fmt: skip
    one, other = ([each] for each in nans)
    assert digests_of(one) == digests_of(one) != digests_of(other)
