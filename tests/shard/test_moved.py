"""Parameters that get other memory, or whose place another takes, after they were registered."""

import copy

import pytest
import torch
import torch.distributed.checkpoint as dcp
from kit import memory
from torch import nn
from torch.distributed.fsdp import fully_shard

import torch_ros
from torch_ros.dcp import ROSReader, ROSWriter
from torch_ros.errors import UsageError

endpoint = pytest.fixture(memory)


class Net(nn.Module):
    """Tied, frozen, and buffers of both kinds."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 4, bias=False)
        self.tied = nn.Linear(4, 4, bias=False)
        self.tied.weight = self.last.weight
        self.first.bias.requires_grad_(requires_grad=False)
        self.register_buffer("router_bias", torch.zeros(3))
        self.register_buffer("cache", torch.zeros(2), persistent=False)

    def forward(self, batch):
        return self.tied(self.last(self.first(batch)))


def whole(tensor):
    tensor = tensor.detach()
    return (tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor).clone()


def require_newest(opened, model, prefix=""):
    """A newcomer reads exactly what `model.state_dict()` has."""
    expected = {prefix + fqn: whole(tensor) for fqn, tensor in model.state_dict().items()}
    with opened("reader") as reader:
        got = {fqn: torch.full_like(tensor, -1) for fqn, tensor in expected.items()}
        reader.register(got)
        reader.replicate("latest")
        for fqn, tensor in expected.items():
            assert torch.equal(got[fqn], tensor), fqn


def fill(model, value):
    with torch.no_grad():
        for tensor in (*model.parameters(), *model.buffers()):
            tensor.fill_(value)


def offload_and_back(model):
    for parameter in model.parameters():
        parameter.data = parameter.data.clone()


def set_storage(model):
    with torch.no_grad():
        model.first.weight.set_(torch.full((4, 4), 3.0))


def new_parameter(model):
    model.first.weight = nn.Parameter(torch.full((4, 4), 3.0))


def new_buffer(model):
    model.router_bias = torch.full((3,), 3.0)


def new_module(model):
    model.first = nn.Linear(4, 4)


def one_more(model):
    model.head = nn.Linear(4, 2)


def untied(model):
    model.tied.weight = nn.Parameter(torch.full((4, 4), 9.0))


def assigned(model):
    state = {fqn: torch.full_like(tensor, 3.0) for fqn, tensor in model.state_dict().items()}
    model.load_state_dict(state, assign=True)


def swapped(model):
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        model.half().float()
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)


def parametrized(model):
    nn.utils.parametrizations.weight_norm(model.first)


MOVES = [
    offload_and_back,
    set_storage,
    new_parameter,
    new_buffer,
    new_module,
    one_more,
    untied,
    assigned,
    swapped,
    parametrized,
    lambda model: model.half().float(),
    lambda model: model.to(torch.float64),
    lambda model: model.to_empty(device="cpu"),
    lambda model: model.share_memory(),
    lambda model: model.load_state_dict(Net().state_dict()),
]
NAMED = ["offload", "set", "parameter", "buffer", "module", "more", "untied", "assign", "swap"]
NAMED += ["parametrized", "half", "dtype", "to_empty", "share", "load"]


def as_module(model):
    return model


def as_function(model):
    return model.state_dict


@pytest.mark.parametrize("move", MOVES, ids=NAMED)
def test_what_a_module_has_by_then_is_published(opened, move):
    model, trainer = Net(), opened("trainer")
    # What a function gives is looked up in the same way.
    trainer.register((as_module, as_function)[MOVES.index(move) % 2](model))
    trainer.publish(1)
    require_newest(opened, model)
    trainer.unpublish()
    move(model)
    fill(model, 7.0)
    trainer.publish(2)
    require_newest(opened, model)


@pytest.mark.parametrize("move", MOVES, ids=NAMED)
def test_a_module_is_filled_where_it_is_by_then(opened, move):
    model, follower = Net(), opened("follower")
    follower.register(model)
    sent, trainer = copy.deepcopy(model), opened("trainer")
    trainer.register(sent)
    trainer.publish(1)
    follower.update()
    trainer.unpublish()
    move(model)
    move(sent)
    fill(sent, 7.0)
    trainer.publish(2)
    assert follower.update()
    got = model.state_dict()
    assert all(torch.equal(got[fqn], tensor) for fqn, tensor in sent.state_dict().items())


def test_a_module_is_published_by_the_names_that_it_has_by_then(opened):
    model, trainer = Net(), opened("trainer")
    trainer.register(model)
    trainer.publish(1)
    trainer.unpublish()
    model.add_module("renamed", model._modules.pop("tied"))  # the last one, in the same place
    trainer.publish(2)
    require_newest(opened, model)


def test_a_module_that_stays_is_registered_once(opened):
    model, trainer = Net(), opened("trainer")
    trainer.register(model)
    trainer.publish(1)
    shown = trainer.checkpoints.registered
    for version in (2, 3):
        trainer.unpublish()
        fill(model, version)
        trainer.publish(version)
    assert trainer.checkpoints.registered is shown


def test_the_names_of_a_module_are_those_of_its_state_dict(opened):
    model, trainer = Net(), opened("trainer")
    trainer.register(model)
    trainer.publish(1)
    assert set(opened("reader").contents(1).tensors) == set(model.state_dict())


def test_a_function_may_give_a_part_by_other_names(opened):
    model, trainer = Net(), opened("trainer")
    trainer.register(
        lambda: {f"lora.{n}": p for n, p in model.named_parameters() if p.requires_grad}
    )
    trainer.publish(1)
    trainer.unpublish()
    model.first.weight = nn.Parameter(torch.full((4, 4), 8.0))
    trainer.publish(2)
    got = {"lora.first.weight": torch.zeros(4, 4), "lora.last.weight": torch.zeros(4, 4)}
    reader = opened("reader", got)
    reader.replicate(2)
    assert torch.equal(got["lora.first.weight"], model.first.weight)


# feature contract {
@pytest.mark.parametrize(
    "move",
    [offload_and_back, set_storage, MOVES[10], MOVES[12]],
    ids=["offload", "set", "half", "to_empty"],
)
@pytest.mark.parametrize("way", ["register", "save", "publish_copy"])
def test_a_state_dict_that_is_old_is_refused_where_an_optimizer_is_guarded(opened, move, way):
    model, trainer = Net(), opened("trainer")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    state = model.state_dict()
    calls = {
        "register": trainer.publish,
        "publish_copy": lambda version: trainer.publish_copy(version, state),
        "save": lambda version: dcp.save(state, storage_writer=ROSWriter(version, handle=trainer)),
    }
    if way == "register":
        trainer.register(state)
    trainer.guard(optimizer)
    calls[way](1)
    trainer.unpublish()
    move(model)
    with pytest.raises(BaseException, match=r"'first\.weight'|'first\.bias'") as caught:
        calls[way](2)
    assert "register(module)" in str(caught.value)
    assert trainer.version is None
    fill(model, 7.0)  # what is empty may be NaN
    trainer.unregister()
    trainer.register(model)
    trainer.publish(2)
    require_newest(opened, model)


def test_another_state_dict_under_the_same_names_is_no_moved_one(opened):
    model, averaged, trainer = Net(), Net(), opened("trainer")
    trainer.guard(torch.optim.SGD(model.parameters(), lr=0.1))
    for version, published in enumerate([model, averaged, model, averaged]):
        offload_and_back(model)
        dcp.save(published.state_dict(), storage_writer=ROSWriter(version, handle=trainer))
        require_newest(opened, published)


def test_a_new_optimizer_of_moved_parameters_is_no_error(opened):
    model, trainer = Net(), opened("trainer")
    first = torch.optim.SGD(model.parameters(), lr=0.1)
    trainer.register(model)
    trainer.guard(first)
    trainer.publish(1)
    trainer.unpublish()
    assigned(model)
    second = torch.optim.SGD(model.parameters(), lr=0.1)
    trainer.guard(second)
    trainer.publish(2)
    require_newest(opened, model)


def test_an_optimizer_of_another_model_is_told_at_once(opened, caplog):
    model, trainer = Net(), opened("trainer")
    trainer.register(model)
    trainer.guard(torch.optim.SGD(model.parameters(), lr=0.1)).remove()
    assert "no parameter of the guarded optimizer" not in caplog.text
    trainer.guard(torch.optim.SGD(copy.deepcopy(model).parameters(), lr=0.1))
    assert "no parameter of the guarded optimizer" in caplog.text


# } contract
def sharded(mesh):
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    for layer in model:
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


# feature contract {
def test_a_module_of_fsdp2_is_published_sharded_whenever_it_is_registered(opened, mesh):
    model, trainer = sharded(mesh), opened("trainer", rank=0, world_size=1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for layer in model:
        layer.unshard()
    trainer.register(model)
    trainer.guard(optimizer)
    for version in range(3):
        model(torch.ones(1, 8)).sum().backward()
        optimizer.step()
        model(torch.ones(1, 8))  # leaves some of it unsharded
        trainer.publish(version)
        with opened("reader", rank=0, world_size=1) as reader:
            got = {fqn: torch.zeros(tensor.shape) for fqn, tensor in model.state_dict().items()}
            reader.register(got)
            reader.replicate()
            for fqn, tensor in model.state_dict().items():
                assert torch.equal(got[fqn], tensor.full_tensor()), fqn


# } contract
def test_parameters_that_fsdp2_has_unsharded_name_the_way_out(opened, mesh):
    model, trainer = sharded(mesh), opened("trainer", rank=0, world_size=1)
    for layer in model:
        layer.unshard()
    unsharded = dict(model.named_parameters())
    for layer in model:
        layer.reshard()
    with pytest.raises(UsageError, match=r"register the module itself, or its state_dict\(\)"):
        trainer.register(unsharded)


def test_a_state_dict_that_a_hook_makes_is_refused_by_name(opened):
    model, trainer = Net(), opened("trainer")
    model.register_state_dict_post_hook(
        lambda _, state, *__: state.update({"first.weight": state["first.weight"] * 2})
    )
    with pytest.raises(UsageError, match=r"'first\.weight' of Net\.state_dict\(\)"):
        trainer.register(model)
    trainer.register({"w": torch.zeros(2)})  # nothing was registered


def test_the_extra_state_of_a_module_is_left_out(opened):
    class Extra(nn.Linear):
        def get_extra_state(self):
            return {"step": 1}

        def set_extra_state(self, state):
            pass

    model, trainer = nn.Sequential(Extra(2, 2)), opened("trainer")
    trainer.register(model)
    trainer.publish(1)
    assert set(opened("reader").contents(1).tensors) == {"0.weight", "0.bias"}


@pytest.mark.parametrize("move", MOVES[:3], ids=NAMED[:3])
def test_dcp_saves_what_a_module_has_by_then(opened, move):
    """dcp asks the module itself for its state_dict(), at each save."""
    model, trainer = Net(), opened("trainer")
    for version in (1, 2):
        writer = ROSWriter(version, handle=trainer)
        dcp.save({"model": model}, storage_writer=writer, planner=writer.planner())
        require_newest(opened, model, "model.")
        trainer.unpublish()
        move(model)
        fill(model, 7.0)


# What a save, a copy or a load leaves for the next call


def test_what_is_published_after_a_copy_is_what_was_registered(opened):
    trainer, rollout = opened("trainer"), opened("rollout")
    weights, got = {"w": torch.zeros(4)}, {"w": torch.zeros(4)}
    trainer.register(weights)
    rollout.register(got)
    calls = [
        trainer.publish,
        lambda version: trainer.publish_copy(version, weights),
        lambda version: dcp.save(
            weights, storage_writer=ROSWriter(version, handle=trainer, mode="copy")
        ),
        lambda version: dcp.save(weights, storage_writer=ROSWriter(version, handle=trainer)),
    ]
    version = 0
    for before in calls:
        for after in calls:
            for each in (before, after):
                version += 1
                weights["w"].fill_(version)
                each(version)
                assert rollout.update()
                assert torch.equal(got["w"], torch.full((4,), float(version)))
                trainer.unpublish()


def test_after_a_copy_a_version_is_read_into_what_was_registered(opened):
    trainer, other = opened("trainer"), opened("other")
    weights = {"w": torch.zeros(4)}
    trainer.register(weights)
    trainer.publish_copy(1, {"w": torch.ones(4)})
    other.register({"w": torch.full((4,), 5.0)})
    other.publish(2)
    assert trainer.update()
    assert torch.equal(weights["w"], torch.full((4,), 5.0))
    other.close()
    trainer.unpublish()
    trainer.publish(3)
    assert trainer.version == 3


@pytest.mark.parametrize("call", ["publish", "replicate", "update"])
def test_a_copy_alone_is_not_published_again_nor_read_into(opened, call):
    trainer, other = opened("trainer"), opened("other")
    trainer.publish_copy(1, {"w": torch.ones(4)})
    if call == "publish":
        trainer.unpublish()
        with pytest.raises(UsageError, match="only a copy"):
            trainer.publish(2)
    else:
        other.register({"w": torch.full((4,), 5.0)})
        other.publish(2)
        if call == "replicate":
            trainer.unpublish()
        with pytest.raises(UsageError, match="only a copy"):
            getattr(trainer, call)()
    assert trainer.version is None
    trainer.register({"w": torch.zeros(4)})
    trainer.publish(3)


def test_tensors_may_be_registered_while_a_copy_is_published(opened):
    trainer, weights, got = opened("trainer"), {"w": torch.ones(4)}, {"w": torch.zeros(4)}
    trainer.publish_copy(1, {"w": torch.full((4,), 5.0)})
    trainer.register(weights)
    reader = opened("reader", got)
    reader.replicate()
    assert torch.equal(got["w"], torch.full((4,), 5.0))
    trainer.unpublish()
    trainer.publish(2)
    reader.update()
    assert torch.equal(got["w"], weights["w"])


def test_a_save_that_fails_leaves_what_was_registered(opened):
    trainer, weights = opened("trainer"), {"w": torch.ones(4)}
    trainer.register(weights)
    trainer.publish(5)
    trainer.unpublish()
    with pytest.raises(BaseException, match="VersionConflict"):
        dcp.save({"w": torch.zeros(3)}, storage_writer=ROSWriter(4, handle=trainer))
    trainer.publish(6)
    got = {"w": torch.zeros(4)}
    dcp.load(got, storage_reader=ROSReader(6, handle=opened("reader")))
    assert torch.equal(got["w"], weights["w"])


def test_what_is_published_live_after_a_copy_is_not_lent(opened):
    trainer, borrower = opened("trainer", borrow_bytes=1 << 20), opened("borrower")
    weights = {"w": torch.ones(4)}
    trainer.register(weights)
    trainer.publish_copy(1, weights)
    trainer.unpublish()
    weights["w"].fill_(2)
    trainer.publish(2)
    with pytest.raises(torch_ros.errors.NotSupported), borrower.borrow(2):
        pass
    stream = borrower.stream(2, ["w"], buffer_bytes=1 << 20)
    assert [float(tensor[0]) for _, tensor in stream] == [2.0]


def test_a_mapping_is_published_as_it_is_by_then(opened):
    weights, trainer = {"first": torch.zeros(4), "last": torch.zeros(2)}, opened("trainer")
    trainer.register(weights)
    weights["first"] = torch.ones(4)
    weights["more"] = torch.ones(3)
    del weights["last"]
    trainer.publish(1)
    with opened("reader") as reader:
        reader.register(got := {"first": torch.zeros(4), "more": torch.zeros(3)})
        got["first"] = torch.zeros(4)
        reader.replicate("latest")
        assert torch.equal(got["first"], torch.ones(4))


def test_a_function_that_makes_copies_is_refused_where_it_is_read_into(opened):
    model, trainer, reader = Net(), opened("trainer"), opened("reader")
    trainer.register(lambda: {fqn: t.clone() for fqn, t in model.state_dict().items()})
    trainer.publish(1)  # of what the model has now
    mine = Net()

    def copies():
        return {fqn: tensor.clone() for fqn, tensor in mine.state_dict().items()}

    reader.register(copies)
    with pytest.raises(UsageError, match=r"makes 'router_bias' anew|makes 'first\.weight' anew"):
        reader.replicate("latest")
    with pytest.raises(UsageError, match="let it return the tensors in use"):
        reader.read("latest", copies)
    reader.unregister()
    reader.register(mine.state_dict)
    reader.replicate("latest")
    assert torch.equal(mine.first.weight, model.first.weight)


@pytest.mark.filterwarnings("ignore:.*torch.jit.script.*:DeprecationWarning")
def test_a_scripted_module_is_published_as_it_is_by_then(opened):
    model, trainer = torch.jit.script(Net()), opened("trainer")
    trainer.register(model)
    offload_and_back(model)
    fill(model, 3.0)
    trainer.publish(1)
    require_newest(opened, model)
